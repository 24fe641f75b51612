// What Python sees: the instruction sets of this CPU, addresses of operations, and replay of a tape.
#include <pthread.h>

#include <cstring>
#include <mutex>

#include "pool.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

// One table per instruction set, ended by a null name. Which ones exist is decided by the build.
namespace generic { extern const NamedOperation operations[]; }
#ifdef QUIRE_HAS_AVX2
namespace avx2 { extern const NamedOperation operations[]; }
#endif
#ifdef QUIRE_HAS_AVX512
namespace avx512 { extern const NamedOperation operations[]; }
#endif
#ifdef QUIRE_HAS_AMX
namespace amx { extern const NamedOperation operations[]; }
#endif

namespace {

// One operation at a time. A fork may happen while another thread holds it, so the child gets a new one.
std::mutex* one_caller = new std::mutex;
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { one_caller = new std::mutex; });

bool has_avx2() {
#ifdef QUIRE_HAS_AVX2
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

bool has_avx512() {
#ifdef QUIRE_HAS_AVX512
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

// Linux hands out the tile registers on request only, once per process.
bool has_amx() {
#if defined(QUIRE_HAS_AMX) && defined(__linux__) && defined(__x86_64__)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    constexpr unsigned kTileBit = 1u << 24, kInt8Bit = 1u << 25;
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if (!has_avx512() || (d & kTileBit) == 0 || (d & kInt8Bit) == 0) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

const NamedOperation* table_of(const char* isa) {
#ifdef QUIRE_HAS_AMX
    if (std::strcmp(isa, "amx") == 0 && has_amx()) return amx::operations;
#endif
#ifdef QUIRE_HAS_AVX512
    if (std::strcmp(isa, "avx512") == 0 && has_avx512()) return avx512::operations;
#endif
#ifdef QUIRE_HAS_AVX2
    if (std::strcmp(isa, "avx2") == 0 && has_avx2()) return avx2::operations;
#endif
    if (std::strcmp(isa, "generic") == 0) return generic::operations;
    return nullptr;
}

}  // namespace
}  // namespace quire

extern "C" {

// Whether this CPU, this system and this build have the instruction set.
int quire_has_isa(const char* isa) { return quire::table_of(isa) != nullptr; }

// The address of an operation for an instruction set, or null.
void* quire_operation(const char* isa, const char* name) {
    const quire::NamedOperation* table = quire::table_of(isa);
    for (; table != nullptr && table->name != nullptr; ++table) {
        if (std::strcmp(table->name, name) == 0) return reinterpret_cast<void*>(table->run);
    }
    return nullptr;
}

void quire_set_num_threads(int count) { quire::set_num_threads(count); }

int quire_num_threads() { return quire::num_threads(); }

void quire_call(void* operation, const int64_t* arguments) {
    std::lock_guard<std::mutex> lock(*quire::one_caller);
    reinterpret_cast<quire::Operation>(operation)(arguments);
}

// Without the lock: for single-threaded operations, which use neither the pool nor the shared scratch memory.
void quire_call_aside(void* operation, const int64_t* arguments) {
    reinterpret_cast<quire::Operation>(operation)(arguments);
}

// Runs (operation, arguments) pairs in order.
void quire_replay(const int64_t* pairs, int64_t count) {
    std::lock_guard<std::mutex> lock(*quire::one_caller);
    for (int64_t i = 0; i < count; ++i) {
        reinterpret_cast<quire::Operation>(pairs[2 * i])(reinterpret_cast<const int64_t*>(pairs[2 * i + 1]));
    }
}

}  // extern "C"
