// All operations for one instruction set: the build compiles this file once per set, with its flags and with
// QUIRE_ISA as the name of the namespace. Inline functions of two sets must never be merged by the linker, so
// everything an operation includes lives in that namespace.
#include "exponential.h"
#include "pool.h"
#include "vector.h"

#include "../activation/cpu.cpp"
#include "../attention/cpu.cpp"
#include "../attention/full.h"
#include "../collective/cpu.cpp"
#include "../embedding/cpu.cpp"
#include "../encoded_linear/cpu.cpp"
#include "../int8_linear/cpu.cpp"
#include "../lora/cpu.cpp"
#include "../lora_pack/cpu.cpp"
#include "../moe/cpu.cpp"
#include "../norm/cpu.cpp"
#include "../pages/cpu.cpp"
#include "../rotary/cpu.cpp"
#include "../sample/cpu.cpp"

namespace quire {
namespace QUIRE_ISA {

extern const NamedOperation operations[];
const NamedOperation operations[] = {
    {"add_layer_norm", add_layer_norm},
    {"add_rms_norm", add_rms_norm},
    {"argmax", argmax},
    {"choose_experts", choose_experts},
    {"combine_experts", combine_experts},
    {"copy_blocks", copy_blocks},
    {"encoded_gather", encoded_gather},
    {"encoded_linear", encoded_linear},
    {"encoded_linear_silu_mul", encoded_linear_silu_mul},
    {"encoded_pack", encoded_pack},
    {"full_attention", full_attention},
    {"gather", gather},
    {"gelu", gelu},
    {"gelu_mul", gelu_mul},
    {"gelu_tanh_mul", gelu_tanh_mul},
    {"group_broadcast", group_broadcast},
    {"group_gather", group_gather},
    {"group_pass", group_pass},
    {"group_reduce", group_reduce},
    {"head_rms_norm", head_rms_norm},
    {"int8_experts", int8_experts},
    {"layer_norm", layer_norm},
    {"linear", linear},
    {"linear_silu_mul", linear_silu_mul},
    {"log_softmax_gather", log_softmax_gather},
    {"lora_add", lora_add},
    {"lora_pack", lora_pack},
    {"paged_attention", paged_attention},
    {"partial_linear", partial_linear},
    {"peaks", peaks},
    {"rms_norm", rms_norm},
    {"rms_norm_onto", rms_norm_onto},
    {"rotate_and_store", rotate_and_store},
    {"router_logits", router_logits},
    {"row_peaks", row_peaks},
    {"sample_filtered", sample_filtered},
    {"scale_sums", scale_sums},
    {"silu_mul", silu_mul},
    {"token_ranks", token_ranks},
    {nullptr, nullptr},
};

}  // namespace QUIRE_ISA
}  // namespace quire
