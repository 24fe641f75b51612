"""Models in their real sizes, one layer each and without memory, run as the engine runs them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.core.layout import BlockLayout
from quire.kernels.lora.records import LoraSegments, LoraTables
from quire.layers.attention import Pool
from quire.layers.batch import AttentionPlans, Batch, TreeMasks
from quire.layers.factory import LayerFactory
from quire.layers.lora import LoraBatch, install_sites, max_segments, segment_length
from quire.models.model import DecoderModel
from quire.models.registry import build, describe
from quire.quant.choice import choose_format
from tools.compile_kernels.record import Recorder

META = torch.device("meta")
MAX_ROWS, MAX_TOKENS, MAX_CONTEXT, NUM_BLOCKS = 256, 8192, 8192, 4096
ROTATED = 16  # positions that have angles: these are computed, and no kernel is compiled for their number


def _llama(hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": MAX_CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "hidden_act": "silu", **more,
    }  # fmt: skip


# What each adds to the ones before it is said beside it.
MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": _llama(4096, 14336, 32, 8, 128256),
    "llama-1b": _llama(2048, 8192, 32, 8, 128256, tie_word_embeddings=True),  # heads of 64
    "llama-70b": _llama(8192, 28672, 64, 8, 128256),  # eight queries to a KV head
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32000),  # one query to a KV head
    "smollm-135m": _llama(576, 1536, 9, 3, 49152, tie_word_embeddings=True),  # widths that are no power of two
    "heads-of-80": _llama(2560, 6912, 32, 32, 50304, head_dim=80),  # nor these heads
    "heads-of-192": _llama(3072, 8192, 16, 4, 32000, head_dim=192, hidden_act="gelu"),
    "heads-of-256": _llama(3072, 24576, 16, 4, 256000, head_dim=256, hidden_act="gelu_pytorch_tanh"),
    "mistral-7b": _llama(
        4096, 14336, 32, 8, 32000, architectures=["MistralForCausalLM"], sliding_window=4096
    ),
    "qwen2-0.5b": _llama(896, 4864, 14, 2, 151936, architectures=["Qwen2ForCausalLM"]),  # biases
    "qwen3-8b": _llama(4096, 12288, 32, 8, 151936, architectures=["Qwen3ForCausalLM"], head_dim=128),  # head norms
    "qwen3-30b-a3b": _llama(
        2048, 6144, 32, 4, 151936, architectures=["Qwen3MoeForCausalLM"], head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),  # experts
    "qwen1.5-moe": _llama(
        2048, 5632, 16, 16, 151936, architectures=["Qwen2MoeForCausalLM"], num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    ),  # a shared expert, and numbers that are no power of two
    "gemma-2-2b": _llama(
        2304, 9216, 8, 4, 256000, architectures=["Gemma2ForCausalLM"], head_dim=256, sliding_window=4096
    ),  # capped scores, norms onto the residual, scaled embeddings
    "bloom-560m": {
        "architectures": ["BloomForCausalLM"], "hidden_size": 1024, "n_layer": 1, "n_head": 16, "vocab_size": 250880,
        "seq_length": 2048,
    },  # slopes
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 1, "n_head": 12, "n_positions": 1024,
        "vocab_size": 50257, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
    },
    "opt-6.7b": {
        "architectures": ["OPTForCausalLM"], "hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 1,
        "num_attention_heads": 32, "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 4096,
        "do_layer_norm_before": True, "activation_function": "relu",
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is served."""

    model: str
    dtype: str = "bfloat16"
    quantization: str = "none"
    kv_dtype: str = ""  # as dtype unless told
    block_size: int = 16
    deterministic: bool = False
    adapters: bool = False
    trees: bool = False  # of drafts, beside all else

    def __str__(self) -> str:
        extras = (
            self.quantization.removeprefix("none"), self.kv_dtype and f"kv {self.kv_dtype}",
            f"blocks of {self.block_size}" if self.block_size != 16 else "",
            *(name for name in ("deterministic", "adapters", "trees") if getattr(self, name)),
        )  # fmt: skip
        return ", ".join([self.model, self.dtype, *filter(None, extras)])


SETTINGS = (
    Setting("llama-8b", trees=True),
    Setting("llama-8b", deterministic=True, trees=True),
    Setting("llama-8b", adapters=True),
    Setting("llama-8b", quantization="fp8", kv_dtype="float8_e4m3fn", trees=True),
    Setting("llama-8b", kv_dtype="float8_e4m3fn", deterministic=True),
    Setting("llama-8b", kv_dtype="int8", trees=True),
    Setting("llama-8b", kv_dtype="int8", deterministic=True, trees=True),
    Setting("smollm-135m", "float16", kv_dtype="int8"),
    Setting("llama-8b", "float16"),
    Setting("llama-8b", "float32", trees=True, adapters=True),
    Setting("llama-8b", "float32", deterministic=True, trees=True),
    Setting("llama-8b", block_size=1),
    Setting("llama-8b", block_size=128),
    Setting("llama-1b", adapters=True),
    Setting("llama-1b", deterministic=True, trees=True),
    Setting("llama-70b"),
    Setting("llama-70b", deterministic=True),
    Setting("llama-2-7b"),
    Setting("smollm-135m", trees=True, adapters=True),
    Setting("smollm-135m", "float32"),
    Setting("smollm-135m", "float32", deterministic=True, trees=True),
    Setting("heads-of-80", "float16", trees=True),
    Setting("heads-of-192", trees=True),
    Setting("heads-of-192", deterministic=True, trees=True),
    Setting("heads-of-256", trees=True),
    Setting("heads-of-256", block_size=1),
    Setting("heads-of-256", "float32"),
    Setting("heads-of-256", deterministic=True, trees=True),
    Setting("mistral-7b", trees=True),
    Setting("mistral-7b", deterministic=True, trees=True),
    Setting("qwen2-0.5b"),
    Setting("qwen3-8b"),
    Setting("qwen3-30b-a3b"),
    Setting("qwen3-30b-a3b", deterministic=True),
    Setting("qwen1.5-moe"),
    Setting("qwen1.5-moe", "float32"),
    Setting("gpt2", "float16"),
    Setting("gpt2", deterministic=True),
    Setting("opt-6.7b", "float16"),
)
# (rows, tokens, the longest row's tokens): decodes of each range of rows, a prompt, prompts beside decodes
STEPS = ((1, 1, 1), (8, 8, 1), (64, 64, 1), (256, 256, 1), (1, 512, 512), (80, 4096, 2048))


def launch_models(recorder: Recorder) -> None:
    """Every setting's launches."""
    for setting in SETTINGS:
        recorder.case = str(setting)
        _Served(setting).run()


class _Served:
    """One model as a runner has it."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._config = config = describe({**MODELS[setting.model], "torch_dtype": setting.dtype})
        numbers = choose_format(
            META, setting.dtype, setting.quantization, deterministic=setting.deterministic
        )
        factory = LayerFactory(numbers, META, ROTATED)
        self._dtype = numbers.activation_dtype
        self._model: DecoderModel = build(config, factory)
        for loader in self._model.loaders().values():
            loader(torch.empty(loader.shape, dtype=self._dtype, device=META))
        kv_dtype = setting.kv_dtype or setting.dtype
        heads = (config.num_kv_heads, config.head_dim)
        layout = BlockLayout(config.num_layers, setting.block_size, *heads, kv_dtype)
        self._pool = Pool(layout, NUM_BLOCKS, META)
        # Without the KV cache's type nothing that was measured on some chip is looked up.
        self._planner = factory.kernel("attention").StepPlanner(
            MAX_ROWS, config.num_heads, *heads, META, max_tokens=MAX_TOKENS, max_context=MAX_CONTEXT,
            block_size=setting.block_size, dtype=self._dtype, deterministic=setting.deterministic,
        )  # fmt: skip
        self._tables: LoraTables | None = None
        self._kinds = 0
        if setting.adapters:
            sites = install_sites(self._model.loaders(), factory.kernel("lora"))
            self._kinds = sum(1 << kind for kind in {site.kind for site in sites})
            self._tables = LoraTables.empty(self._pool.elements(self._dtype), MAX_ROWS, len(sites))

    def run(self) -> None:
        for batch in self._batches():
            hidden = self._model(batch, self._pool)
            self._model.logits(hidden, batch.wanted_lora)

    def _batches(self) -> Iterator[Batch]:
        for rows, tokens, longest in STEPS:
            batch = self._batch(rows, tokens, longest)
            yield batch
            if self._setting.trees and longest > 1:
                masks = TreeMasks(ints(tokens), torch.empty(tokens, dtype=torch.int64, device=META))
                yield replace(batch, trees=masks, lora=None, wanted_lora=None)

    def _batch(self, rows: int, tokens: int, longest: int) -> Batch:
        starts, lens = ints(rows + 1), ints(rows)
        tables = ints(MAX_ROWS, -(-MAX_CONTEXT // self._setting.block_size))[:rows]
        wanted = ints(rows) if tokens > rows else None
        return Batch(
            token_ids=ints(tokens),
            positions=ints(tokens),
            slots=torch.empty(tokens, dtype=torch.int64, device=META),
            query_starts=starts,
            context_lens=lens,
            block_tables=tables,
            logits_indices=wanted,
            max_query_len=longest,
            plans=AttentionPlans(self._planner, starts, lens, lens, tokens, tables),
            lora=self._lora(tokens),
            wanted_lora=self._lora(rows),
        )

    def _lora(self, num_lines: int) -> LoraBatch | None:
        if self._tables is None:
            return None
        longest = segment_length(num_lines, self._setting.deterministic)
        count = max_segments(num_lines, MAX_ROWS, longest)
        segments = LoraSegments(ints(num_lines), ints(count), ints(count + 1), longest)
        return LoraBatch(self._tables, segments, self._kinds)


def ints(*shape: int) -> Tensor:
    """int32, on no device."""
    return torch.empty(shape, dtype=torch.int32, device=META)
