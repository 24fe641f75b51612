"""Whether a GPU gives the CPU's tokens, feature by feature: `python -m quire_lab.benchmarks.gpu_check [--output FILE]`.

Tiny random models in float32, so that a different order of sums changes no token; every line is one way to run the same
requests (greedy, drawn with a seed, several samples). Some lines are of another kind: a card that is full, how often
the host waits for the device in a step (two of them), how far bfloat16's logits are from float32's, and attention over
int8 pages against the reference. Run it on every new chip and after every change of a kernel. With `--device cpu` the
script checks itself. The exit status is the number of lines that differ.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from quire import LLM, SamplingParams
from quire.bench.machine import describe_origin
from quire.core.layout import BlockLayout
from quire.core.request import Request
from quire.kernels.moe import reference as moe_reference
from quire.kernels.registry import REFERENCE, choose, load
from quire.layers.attention import Pool

# How often the host waits for the device in a step: what torch says of its own operations, and events and streams.

SAID = (
    "called a synchronizing CUDA operation"  # torch's words for a wait, and not those about the mode itself
)
CALLS = ((torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda, "synchronize"))


def longest_waits(llm: LLM, prompts: list[list[int]], samplings: list[SamplingParams]) -> list[str]:
    """Where the host waited in the step in which it waited most often: one line for each wait."""
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        llm.engine.add(Request(str(i), prompt, sampling))
    most: list[str] = []
    while llm.engine.has_work:
        with counted() as waits:
            llm.engine.step()
        most = max(most, waits, key=len)
    return most


@contextmanager
def counted() -> Iterator[list[str]]:
    """A list that grows with every wait."""
    waits: list[str] = []
    with warnings.catch_warnings(record=True) as warned, ExitStack() as stack:
        warnings.simplefilter("always")
        for owner, name in CALLS:
            stack.enter_context(patch.object(owner, name, _noting(getattr(owner, name), waits, name)))
        if torch.cuda.is_available():
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
        yield waits
    waits += [f"{warning.filename}:{warning.lineno}" for warning in warned if SAID in str(warning.message)]


def _noting(call: Callable[..., Any], waits: list[str], name: str) -> Callable[..., Any]:
    def noted(*given: Any, **named: Any) -> Any:
        waits.append(name)
        return call(*given, **named)

    return noted


MODEL_LEN, VOCABULARY = 512, 1000
NUM_PROMPTS = 12
TREES = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "tree_width": 3, "adaptive": false}'
CHAINS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": false}'
SWAPPED = "a small pool, swapped"
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "without graphs": {"enforce_eager": True},
    "blocks of 1": {"block_size": 1},
    "blocks of 128": {"block_size": 128},
    "prompts in small chunks": {"max_num_batched_tokens": 32},
    "prompts beside many rows": {"max_num_batched_tokens": 100, "max_num_seqs": 20},
    "drafted chains": {"speculative_config": CHAINS},
    "drafted trees": {"speculative_config": TREES},
    "a small pool, computed again": {"num_blocks": 24, "preemption_mode": "recompute"},
    SWAPPED: {"num_blocks": 24, "preemption_mode": "swap", "swap_space": 0.1},
    "weights streamed from the host": {"cpu_offload_gb": 0.004},
    "deterministic": {"deterministic": True},
}
RANKS = (1, 8, 17, 64)
SLACKS = (0, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20)  # bytes left on a card that is full
EXPERTS_ERROR = 0.01  # of the sum of experts, shared expert and residual in bfloat16
BF16_ERROR = 0.05  # of a position's logits, |bf16 - fp32| / |fp32|, where weights amplify nothing

Answers = list[list[list[int]]]  # request, sample, token
Check = Callable[[], tuple[Answers, Answers]]  # what was found, what is right


def save_model(name: str, folder: str, scale: float = 0.2) -> None:
    """`scale`: of the weights. A large one makes logits differ, and errors grow from layer to layer."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        OPTConfig,
        OPTForCausalLM,
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
    )

    torch.manual_seed(0)
    size: dict[str, Any] = {
        "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    if name == "llama":
        config: Any = LlamaConfig(
            **size, intermediate_size=512, num_key_value_heads=2, head_dim=64, initializer_range=scale,
            bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    elif name == "mixture":
        mixture = Qwen2MoeConfig(
            **size, num_key_value_heads=2, initializer_range=scale, num_experts=12, num_experts_per_tok=3,
            moe_intermediate_size=128, shared_expert_intermediate_size=256, eos_token_id=2,
        )  # fmt: skip
        Qwen2MoeForCausalLM(mixture).save_pretrained(folder)
    else:
        config = OPTConfig(**size, ffn_dim=512, word_embed_proj_dim=256, init_std=scale)
        OPTForCausalLM(config).save_pretrained(folder)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[(7 * i + 3 * j) % 37 + 10 for j in range(5 + 11 * i)] for i in range(NUM_PROMPTS)]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    drawn = greedy.changed(temperature=0.9, top_p=0.9, n=3)
    return prompts, [greedy if i % 3 else drawn.changed(seed=i) for i in range(NUM_PROMPTS)]


class Checker:
    def __init__(self, model: str, folder: str, device: str) -> None:
        self._model, self._folder, self._device = model, folder, device

    def engine(self, device: str | None = None, folder: str | None = None, **settings: Any) -> LLM:
        gc.collect()  # the engine before has given its memory back
        sizes = {} if "num_blocks" in settings else {"kv_cache_memory_bytes": 100 << 20}
        return LLM(
            folder or self._folder, quantization="none", device=device or self._device, use_tqdm=False,
            max_model_len=MODEL_LEN, **{"dtype": "float32", **sizes, **settings},
        )  # fmt: skip

    def answers(self, device: str | None = None, **settings: Any) -> Answers:
        with self.engine(device, **settings) as llm:
            return tokens_of(llm.generate(*requests(), use_tqdm=False))

    def beams(self, device: str | None = None) -> Answers:
        with self.engine(device) as llm:
            return tokens_of(llm.beam_search(requests()[0][:4], beam_width=4, max_tokens=12))

    def with_adapters(self, device: str | None = None, **settings: Any) -> Answers:
        """Adapters of several ranks and none in one batch, from memory or, with `lora_dir`, from files."""
        with self.engine(device, enable_lora=True, **settings) as llm:
            for rank in RANKS if "lora_dir" not in settings else ():
                llm.add_adapter(f"rank-{rank}", *random_adapter(rank))
            prompts, samplings = requests()
            names = [None, *(f"rank-{rank}" for rank in RANKS)]
            chosen = [names[i % len(names)] for i in range(len(prompts))]
            return tokens_of(llm.generate(prompts, samplings, adapter=chosen, use_tqdm=False))

    def with_adapter_files(self) -> Answers:
        """Into a pool so small that they evict each other, told apart without a hash."""
        with tempfile.TemporaryDirectory() as folder:
            for rank in RANKS:
                save_adapter(Path(folder, f"rank-{rank}"), rank)
            return self.with_adapters(lora_dir=folder, num_blocks=60, enable_prefix_caching=False)

    def found_again(self) -> Answers:
        """Prompts that were evicted to host memory and come back, asked for twice."""
        with self.engine(num_blocks=40, kv_offload_gb=0.1) as llm:
            first = tokens_of(llm.generate(*requests(), use_tqdm=False))
            again = tokens_of(llm.generate(*requests(), use_tqdm=False))
            return again if first == again else [*first, *again]

    def memory_runs_out(self, wanted: Answers) -> tuple[Answers, Answers]:
        """The card is filled to the brim: who is shed is told why, the others and all that come later are answered."""
        num_shed = num_answered = 0
        # graphs have their memory from the start: only steps without one can find none
        settings = {"max_num_batched_tokens": 2048, "enable_prefix_caching": False, "enforce_eager": True}
        with self.engine(**settings) as llm:
            for slack in SLACKS:
                with at_most(slack):
                    answers, errors = served(llm)
                for request in sorted(set(range(NUM_PROMPTS)) - errors.keys()):
                    if answers[request] != wanted[request]:
                        raise RuntimeError(f"with {slack} bytes left request {request} said something else")
                num_shed, num_answered = num_shed + len(errors), num_answered + NUM_PROMPTS - len(errors)
                if not all("did not fit the GPU's memory" in text for text in errors.values()):
                    raise RuntimeError(f"ended for another reason: {errors}")
            answers, errors = served(llm)
        print(f"memory ran out: {num_shed} requests were shed, {num_answered} answered", flush=True)
        if errors or not num_shed or not num_answered:
            raise RuntimeError(f"{num_shed} shed, {num_answered} answered, afterwards {len(errors)} shed")
        return [answers[request] for request in range(NUM_PROMPTS)], wanted

    def waits(self, **asked: Any) -> tuple[Answers, Answers]:
        """The host waits once per step, for the tokens of the step before: prompts, mixed steps and decodes."""
        prompts, samplings = requests()
        samplings = [one.changed(**asked) for one in samplings]
        with self.engine(enable_prefix_caching=False) as llm:  # so that both times steps are the same
            llm.generate(prompts, samplings, use_tqdm=False)  # graphs that are captured when first needed
            waits = longest_waits(llm, prompts, samplings)
        if len(waits) > 1:
            raise RuntimeError(f"the host waited {len(waits)} times in a step: {', '.join(waits)}")
        return [], []

    def half_precision(self) -> tuple[Answers, Answers]:
        """Each prompt's logits in bfloat16 lie near those in float32."""
        if self._device == "cpu":  # some virtual machines advertise matrix tiles that oneDNN then cannot use
            torch.backends.mkldnn.enabled = False
        with tempfile.TemporaryDirectory() as folder:
            save_model(self._model, folder, scale=256**-0.5)
            exact, half = (self._logits(folder, dtype) for dtype in ("float32", "bfloat16"))
        error = float(((half - exact).norm(dim=1) / exact.norm(dim=1)).max())
        if not error <= BF16_ERROR:
            raise RuntimeError(f"bf16 logits are {error:.2%} from fp32's, and {BF16_ERROR:.0%} are allowed")
        return [], []

    def _logits(self, folder: str, dtype: str) -> torch.Tensor:
        """[prompts, vocabulary], as the model gives them to the sampler."""
        per_prompt: list[torch.Tensor] = []
        with self.engine(folder=folder, dtype=dtype) as llm:
            model: Any = llm.engine._runner._ops._model  # type: ignore[attr-defined]
            logits = model.logits

            def noted(*given: Any) -> torch.Tensor:
                per_prompt.append(logits(*given).float())
                return per_prompt[-1].clone()  # sampling uses its own up

            model.logits = noted
            llm.generate(requests()[0], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        return torch.cat(per_prompt)


@contextmanager
def at_most(slack: int) -> Iterator[None]:
    """This process may allocate `slack` more bytes of the GPU, as if other processes had the rest."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + slack) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def served(llm: LLM) -> tuple[dict[int, list[list[int]]], dict[int, str]]:
    """All requests at once, step by step: answers, and the errors of requests that were shed."""
    for number, (prompt, sampling) in enumerate(zip(*requests(), strict=True)):
        llm.engine.add(Request(str(number), prompt, sampling))
    answers: dict[int, dict[int, list[int]]] = {}
    errors: dict[int, str] = {}
    while llm.engine.has_work:
        for update in llm.engine.step():
            request = int(update.request_id)
            answers.setdefault(request, {}).setdefault(update.index, []).extend(update.token_ids)
            if update.error is not None:
                errors[request] = str(update.error)
    return {request: [said[i] for i in sorted(said)] for request, said in answers.items()}, errors


def tokens_of(results: list[Any]) -> Answers:
    return [[list(output.token_ids) for output in one.outputs] for one in results]


def random_adapter(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    shapes = {"q_proj": (256, 256), "k_proj": (256, 128), "v_proj": (256, 128), "o_proj": (256, 256)}
    tensors = {}
    for layer in range(3):
        for name, (columns, lines) in shapes.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.1
            tensors[f"{stem}.lora_B.weight"] = torch.randn(lines, rank, generator=generator) * 0.1
    return tensors, {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(shapes)}


def save_adapter(folder: Path, rank: int) -> None:
    from safetensors.torch import save_file

    tensors, config = random_adapter(rank)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def checks(checker: Checker, model: str, device: str) -> dict[str, Check]:
    is_llama = model == "llama"
    with plain_kernels(device):
        wanted = checker.answers("cpu")
        beams = checker.beams("cpu")
        adapted = checker.with_adapters("cpu") if is_llama else []
    all_checks: dict[str, Check] = {
        name: lambda settings=settings: (checker.answers(**settings), wanted)
        for name, settings in WAYS.items()
    }
    all_checks["beams"] = lambda: (checker.beams(), beams)
    all_checks["evicted prompts come back"] = lambda: (checker.found_again(), wanted)
    if is_llama:
        all_checks["adapters"] = lambda: (checker.with_adapters(), adapted)
        all_checks["adapters from files"] = lambda: (checker.with_adapter_files(), adapted)
    plain: dict[str, Answers] = {}

    def does_not_show(kv: str, **settings: Any) -> tuple[Answers, Answers]:
        same = {"deterministic": True, "kv_cache_dtype": kv}
        if kv not in plain:
            plain[kv] = checker.answers(**same)
        return checker.answers(**same, **settings), plain[kv]

    all_checks["deterministic, drafted chains"] = lambda: does_not_show("auto", speculative_config=CHAINS)
    all_checks["deterministic, drafted trees"] = lambda: does_not_show("auto", speculative_config=TREES)
    all_checks["int8 KV attention"] = lambda: int8_pages(torch.device(device))
    all_checks["int8 KV, deterministic, drafted trees"] = lambda: does_not_show(
        "int8", speculative_config=TREES
    )
    all_checks["int8 KV, deterministic, swapped"] = lambda: does_not_show("int8", **WAYS[SWAPPED])
    if device == "cuda":
        all_checks["memory runs out"] = lambda: checker.memory_runs_out(wanted)
    all_checks["one synchronisation per step"] = checker.waits
    all_checks["one synchronisation per step, every kind of sampling"] = lambda: checker.waits(
        logprobs=2, presence_penalty=0.5, repetition_penalty=1.1, min_tokens=4, logit_bias={11: 2.0}, top_k=40
    )
    all_checks[f"bf16 logits within {BF16_ERROR:.0%} of fp32's"] = checker.half_precision
    if model == "mixture":
        all_checks["experts by a GEMV and by a grouped GEMM"] = lambda: experts_agree(device)
    if device == "cuda" and is_llama:
        all_checks["CUDA_VISIBLE_DEVICES by UUID"] = seen_by_uuid
    return all_checks


def int8_pages(device: torch.device) -> tuple[Answers, Answers]:
    """K and V are stored as the reference stores them, and attention over these pages is near the reference's."""
    contexts, queries, heads, kv_heads = [1300, 70, 4000, 33, 600], [1, 1, 1, 33, 200], 32, 8
    starts = torch.tensor([0, *queries], device=device).cumsum(0).int()
    for dtype, head_dim, most in ((torch.float32, 64, 1e-5), (torch.bfloat16, 128, 1e-2)):
        if dtype is torch.bfloat16 and device.type == "cpu":
            continue  # native kernels compute in float32
        torch.manual_seed(0)
        layout = BlockLayout(1, 16, kv_heads, head_dim, "int8")
        qkv = torch.randn(sum(contexts), (heads + 2 * kv_heads) * head_dim).to(device, dtype)
        counts = [-(-context // 16) for context in contexts]
        pools = [Pool(layout, sum(counts) + 1, device) for _ in range(2)]
        tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
        for row, ids in enumerate((torch.randperm(sum(counts)) + 1).int().split(counts)):
            tables[row, : len(ids)] = ids
        slots = [
            tables[row, position // 16].long() * 16 + position % 16
            for row, context in enumerate(contexts)
            for position in [torch.arange(context)]
        ]
        positions = torch.cat([torch.arange(context) for context in contexts]).int().to(device)
        cos_sin = torch.rand(max(contexts), head_dim, device=device)
        for pool, rotary in zip(pools, (choose("rotary", device), load("rotary", REFERENCE)), strict=True):
            rotary.rotate_and_store(
                qkv.clone(), heads, kv_heads, head_dim, cos_sin, positions, torch.cat(slots).to(device),
                *pool.layer(0), *pool.scales(0),
            )  # fmt: skip
        others = float((pools[0].data != pools[1].data).float().mean())
        if others > 1e-3:  # a division may round otherwise
            raise RuntimeError(f"{others:.2%} of the stored bytes are not the reference's ({dtype})")
        (k_pages, v_pages), (k_scales, v_scales) = pools[0].layer(0), pools[0].scales(0)
        q = torch.randn(sum(queries), heads, head_dim).to(device, dtype) * 2
        lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
        where = (k_pages, v_pages, starts, lengths, tables.to(device), head_dim**-0.5)
        scales = {"k_scales": k_scales, "v_scales": v_scales}
        wanted = load("attention", REFERENCE).paged_attention(q.float(), *where, **scales)
        fixed = [{}] if device.type == "cpu" else [{"deterministic": False}, {"deterministic": True}]
        for more in fixed:
            output = choose("attention", device).paged_attention(q, *where, **scales, **more).float()
            error = float((output - wanted).norm() / wanted.norm())
            if not error <= most:
                raise RuntimeError(f"attention over int8 pages is off by {error:.1e} ({dtype}, {more})")
    return [], []


@contextmanager
def plain_kernels(device: str) -> Iterator[None]:
    """The CPU's answers from plain torch: a GPU machine need not compile the native kernels."""
    if device == "cuda":
        os.environ["QUIRE_KERNELS"] = "reference"
    yield
    os.environ.pop("QUIRE_KERNELS", None)


def experts_agree(device: str) -> tuple[Answers, Answers]:
    """The experts of a Qwen3-30B-A3B layer in bfloat16 against the reference in float32, for few and many tokens."""
    torch.manual_seed(0)
    fast: Any = choose("moe", device)
    on_gpu = device == "cuda"
    like: dict[str, Any] = {"dtype": torch.bfloat16 if on_gpu else torch.float32, "device": device}
    num_experts, hidden, inner = (128, 2048, 768) if on_gpu else (16, 64, 32)
    gate_up = torch.randn(num_experts, 2 * inner, hidden, **like) * 0.02
    down = torch.randn(num_experts, hidden, inner, **like) * 0.02
    for tokens in (1, 3, 64, 700, 4096) if on_gpu else (1, 3, 64):
        x, shared, residual = (torch.randn(tokens, hidden, **like) for _ in range(3))
        routing = fast.choose(torch.randn(tokens, num_experts + 1, device=device), num_experts, 8, True)
        for invariant in (False, True):
            result = fast.experts(x, gate_up, down, routing, residual.clone(), shared, invariant).float()
            wide = (t.float() for t in (x, gate_up, down))
            right = moe_reference.experts(*wide, routing, residual.float(), shared.float())
            error = float((result - right).norm() / right.norm())
            if not error <= EXPERTS_ERROR:
                raise RuntimeError(
                    f"{tokens} tokens: {error:.2%} from float32, and {EXPERTS_ERROR:.0%} are allowed"
                )
    return [], []


def seen_by_uuid() -> tuple[Answers, Answers]:
    """A process that is given its GPU by UUID finds it and answers."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = [
        sys.executable,
        "-m",
        "quire_lab.benchmarks.gpu_check",
        "--only",
        "as it comes",
        "--models",
        "llama",
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
    return [[[done.returncode]]], [[[0]]]


def difference(answers: Answers, wanted: Answers) -> str | None:
    """Where two sets of answers part first; None if they do not."""
    if len(answers) != len(wanted):
        return f"{len(answers)} answers, not {len(wanted)}"
    for request, (some, others) in enumerate(zip(answers, wanted, strict=True)):
        for sample, (mine, right) in enumerate(zip(some, others, strict=False)):
            for index, (token, other) in enumerate(zip(mine, right, strict=False)):
                if token != other:
                    return f"request {request}, sample {sample}, token {index}: {token}, not {other}"
        if list(map(len, some)) != list(map(len, others)):
            return (
                f"request {request}: answers of {list(map(len, some))} tokens, not {list(map(len, others))}"
            )
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="llama,opt,mixture")
    parser.add_argument("--only", help="the name of one line")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here: run it on one, or try the script itself with --device cpu")
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            save_model(model, folder)
            checker = Checker(model, folder, options.device)
            for name, check in checks(checker, model, options.device).items():
                if options.only in (None, name):
                    rows.append({"model": model, "check": name, **run(check)})
                    print(json.dumps(rows[-1]), flush=True)
                    write(rows, options)
                    if "CUDA error" in (rows[-1]["error"] or ""):
                        sys.exit("the GPU has failed for this process: what follows was not run")
    if not rows:
        parser.error(f"--only {options.only!r} is no line of these models: leave it out to see all names")
    sys.exit(sum(not row["same"] for row in rows))


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """After every line: a run that is cut off has said what it found."""
    if options.output is None:
        return
    record = {**describe_origin(), "device": options.device, "checks": rows}
    options.output.write_text(json.dumps(record, indent=1) + "\n")


def run(check: Check) -> dict[str, Any]:
    """An exception is one more way to differ: the other lines are still wanted."""
    started = time.perf_counter()
    try:
        error = difference(*check())
    except Exception as problem:
        traceback.print_exc()
        error = f"{type(problem).__name__}: {problem}"[:500]
    return {"same": error is None, "seconds": round(time.perf_counter() - started, 1), "error": error}


if __name__ == "__main__":
    main()
