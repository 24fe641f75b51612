"""Speculation, beams and parallel samples on one GPU: `python -m quire_lab.benchmarks.speculate_gpu --output FILE`.

Random weights, prefix cache off, greedy, 128 tokens in, `--tokens` out. A draft's acceptance rate is set by hand: a
logit bias makes the target choose one known token everywhere, and the synthetic draft proposes it as often as it is
told to, at no cost of its own. So the numbers are of verification: what a draft of this acceptance rate would gain if
it cost nothing.
Rows are tokens per second, plain and with chains and trees, then beams and `n` samples beside as many plain sequences,
at every batch size; each is a median of runs after a warm one.
Kernels for trees are checked first, against the reference and by tokens of a small model in full precision; then, bit
for bit, what `--deterministic` promises: `--only deterministic` does this part and no other, and
`--skip-checks` all but these parts. FILE is written after every row: a run that is cut off keeps what it has.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quire_lab.benchmarks import workloads

# What `--deterministic` promises of speculation on a GPU (`--only deterministic`).

SHAPE = {
    **workloads.SHAPES["smol135m"],
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
PARENTS = [-1, 0, 1, 2, -1, 4, 5, 6, 5, 8, 9, -1, 11, 12]
TOKENS = 40


def check_deterministic(device: str) -> dict[str, Any]:
    """What was compared, and under `failures` a line for everything that differs."""
    failures: list[str] = []
    record: dict[str, Any] = {"failures": failures}
    if device == "cuda":
        record["queries"] = sum(
            check_queries(device, dtype, base, window, failures)
            for dtype in ("bfloat16", "float16", "float32")
            for base, window in ((1, 0), (60, 0), (505, 0), (700, 0), (700, 100), (2040, 0))
        )
    dtypes = ("bfloat16", "float32") if device == "cuda" else ("auto",)
    record["tokens"] = {dtype: _check_fixed_tokens(device, dtype, failures) for dtype in dtypes}
    return record


def _check_fixed_tokens(device: str, dtype: str, failures: list[str]) -> int:
    """How many tokens of trees and chains were compared."""
    from quire import LLM, SamplingParams
    from quire.speculate.adapt import Shape
    from quire_lab.baselines.synthetic_drafts import SyntheticProposer

    speculative = {
        "method": "ngram", "num_speculative_tokens": 4, "tree_width": 3, "adaptive": False,
        "disable_by_batch_size": 4096,
    }  # fmt: skip
    # Borders of tiles and chunks lie inside the answers.
    prompts = workloads.prompts(
        [(n, TOKENS) for n in (3, 40, 100, 490, 500, 17, 60, 250)], SHAPE["vocab_size"]
    )
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        llm = LLM(
            folder, load_format="dummy", device=device, dtype=dtype, use_tqdm=False, enable_prefix_caching=False,
            deterministic=True, speculative_config=speculative, max_model_len=1024, num_blocks=600, max_num_seqs=16,
        )  # fmt: skip
        speculation = llm.engine.speculation
        vocab_size, compared = SHAPE["vocab_size"], 0
        speculation.propose_with(SyntheticProposer({}, vocab_size, 0.0), Shape(0))
        plain = _answers(llm, prompts, sampling, len(prompts))
        known = {(tuple(prompt), 0): tokens for prompt, (tokens, _) in zip(prompts, plain, strict=True)}
        for shape, batch in ((Shape(4, 3), 8), (Shape(4, 3), 1), (Shape(2, 3), 3), (Shape(4, 1), 8)):
            before = speculation.stats.num_accepted_tokens
            speculation.propose_with(SyntheticProposer(known, vocab_size, 0.5, 0.9), shape)
            drafted = _answers(llm, prompts, sampling, batch)
            if speculation.stats.num_accepted_tokens == before:
                failures.append(f"{dtype}, {shape}: nothing was accepted")
            for i, (expected, other) in enumerate(zip(plain, drafted, strict=True)):
                for what, mine, others in zip(("token", "logprobs"), expected, other, strict=True):
                    places = [
                        j for j, pair in enumerate(zip(mine, others, strict=True)) if pair[0] != pair[1]
                    ]
                    if places:
                        failures.append(f"{dtype}, {shape}, prompt {i}: another {what} from {places[0]} on")
                compared += len(expected[0])
        llm.close()
    return compared


def _answers(
    llm: Any, prompts: list[list[int]], sampling: Any, batch: int
) -> list[tuple[list[int], list[Any]]]:
    """Tokens and logprobs of each prompt, asked `batch` at a time."""
    outputs: list[Any] = []
    for first in range(0, len(prompts), batch):
        outputs += llm.generate(prompts[first : first + batch], sampling, use_tqdm=False)
    return [(list(one.outputs[0].token_ids), list(one.outputs[0].logprobs)) for one in outputs]


def check_queries(
    device: str,
    dtype: str,
    base: int,
    window: int,
    failures: list[str],
    heads: tuple[int, int, int] = (32, 8, 128),
) -> int:
    """The tree begins at `base`; `heads` are those of queries, of K and V, and their size. How many were compared."""
    import torch

    from quire.core.draft import ancestors, depths
    from quire.core.request import ints
    from quire.kernels.attention import triton

    torch.manual_seed(base)
    of = {"device": device, "dtype": getattr(torch, dtype)}
    num_heads, num_kv_heads, head_dim = heads
    size, context, parents = 16, base + len(PARENTS), ints(PARENTS)
    num_blocks = -(-context // size)
    table = (torch.randperm(num_blocks, device=device) + 1).int()
    own = torch.arange(num_blocks + 1, 2 * num_blocks + 1, device=device).int()
    k, v = torch.randn(2, 2 * num_blocks + 1, size, num_kv_heads, head_dim, **of)
    q = torch.randn(1 + len(parents), num_heads, head_dim, **of)

    def integers(values: Any, kind: Any = torch.int32) -> Any:
        return torch.tensor(list(values), dtype=kind, device=device)

    def attend(queries: Any, length: int, blocks: Any, *trees: Any) -> Any:
        where = integers([0, len(queries)]), integers([length]), blocks[None]
        scale = head_dim**-0.5
        return triton.paged_attention(queries, k, v, *where, scale, window, None, *trees, deterministic=True)

    seen = [0, *ancestors(parents)]
    positions = [base - 1, *(base + depth for depth in depths(parents))]
    masks = integers([base] * len(q)), integers(seen, torch.int64), integers(positions)
    output = attend(q, context, table, *masks)
    compared = 0
    for leaf in range(len(parents)):
        nodes = [node for node in range(len(parents)) if seen[1 + leaf] >> node & 1]
        sources = integers([*range(base), *(base + node for node in nodes)], torch.int64)
        targets = torch.arange(len(sources), device=device)
        for pages in (k, v):  # here the path lies as an accepted one does
            pages[own[targets // size], targets % size] = pages[table[sources // size], sources % size]
        asked = [0, *(1 + node for node in nodes)]
        for count in (1, len(asked)):  # the leaf as a decode, then its path as a chain
            plain = attend(q[asked[-count:]], len(sources), own)
            if not torch.equal(plain, output[asked[-count:]]):
                most = float((plain.float() - output[asked[-count:]].float()).abs().max())
                failures.append(
                    f"{dtype}, base {base}, window {window}, node {leaf}, {count} queries: {most:.2e} apart"
                )
            compared += count
    return compared


PROMPT = 128
WORD = 17  # the token that the target always chooses
FORKS = 4  # samples or beams of a prompt
TIMED = 3  # runs of a row; its median counts
RESCUE = 0.5  # where a tree's first branch begins wrong, another begins right
SHAPES = (("plain", 0, 1), ("chain 4", 4, 1), ("tree 3×4", 4, 3))  # name, length, width
TINY = {
    **workloads.SHAPES["smol135m"],
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama8b", help="of workloads.SHAPES, or tiny")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--agreements", default="0.6,0.8")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=["deterministic"], help="this part alone, and nothing is timed")
    parser.add_argument("--skip-checks", action="store_true", help="only time: the checks were run before")
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args()
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "PyTorch sees no GPU here: run it on one, or try the script itself with --device cpu --shape tiny"
        )
    if options.skip_checks and options.only:
        parser.error("--skip-checks leaves nothing of --only deterministic: choose one of them")
    report = SpeculationReport(options)
    if not options.skip_checks:
        report.checked["deterministic"] = check_deterministic(options.device)
        if options.only is None:
            report.checked |= _check(options.device)
        print(json.dumps({"checked": report.checked}), flush=True)
    report.write()
    if options.only is None:
        _measure(options, report)
    print(json.dumps(report.record(), ensure_ascii=False))
    sys.exit(len(report.checked.get("deterministic", {}).get("failures", ())))


class SpeculationReport:
    """What was found so far, on the screen and in the file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._began = options, time.perf_counter()
        self.checked: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        _show(row)
        self.write()

    def record(self) -> dict[str, Any]:
        seconds = time.perf_counter() - self._began
        return {**_facts(self._options), "checked": self.checked, "rows": self.rows, "seconds": seconds}

    def write(self) -> None:
        if self._options.output:
            text = json.dumps(self.record(), indent=1, ensure_ascii=False) + "\n"
            Path(self._options.output).write_text(text)


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    from quire.bench.machine import describe_origin

    return {
        "shape": options.shape,
        "prompt_tokens": PROMPT,
        "output_tokens": options.tokens,
        "branch_acceptance": RESCUE,
        **describe_origin(),
    }


# ---------------------------------------------------------------------- speed


def _engine(folder: str, shape: dict[str, Any], device: str, **settings: Any) -> Any:
    from quire import LLM

    Path(folder, "config.json").write_text(json.dumps(shape))
    speculative = {
        "method": "ngram", "num_speculative_tokens": 4, "tree_width": 3, "adaptive": False,
        "disable_by_batch_size": 4096,
    }  # fmt: skip
    return LLM(
        folder, load_format="dummy", device=device, use_tqdm=False, enable_prefix_caching=False,
        speculative_config=speculative, max_model_len=1024, **settings,
    )  # fmt: skip


def _measure(options: argparse.Namespace, report: SpeculationReport) -> None:
    shape = TINY if options.shape == "tiny" else workloads.SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as folder:
        most = FORKS * max(map(int, options.batches.split(",")))
        llm = _engine(folder, shape, options.device, max_num_seqs=most)
        print(*llm.report.lines(), sep="\n", flush=True)
        rows = report.rows
        for batch in map(int, options.batches.split(",")):
            for acceptance_rate in map(float, options.agreements.split(",")):
                for name, length, width in SHAPES:
                    if length == 0 and rows and rows[-1]["batch"] == batch:
                        continue  # plain decoding knows no acceptance_rate
                    report.add(_case(llm, shape, options.tokens, batch, name, length, width, acceptance_rate))
        for batch in map(int, options.batches.split(",")):
            for row in _forked(llm, shape, options.tokens, batch):
                report.add(row)
        llm.close()


def _case(
    llm: Any,
    shape: dict[str, Any],
    tokens: int,
    batch: int,
    name: str,
    length: int,
    width: int,
    acceptance_rate: float,
) -> dict[str, Any]:
    from quire import SamplingParams
    from quire.speculate.adapt import Shape
    from quire_lab.baselines.synthetic_drafts import SyntheticProposer

    prompts = workloads.prompts([(PROMPT, tokens)] * batch, shape["vocab_size"])
    answers = {(tuple(prompt), 0): [WORD] * tokens for prompt in prompts}
    speculation = llm.engine.speculation
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logit_bias={WORD: 100.0})

    def prepare() -> None:  # the same steps every time
        proposer = SyntheticProposer(answers, shape["vocab_size"], acceptance_rate, RESCUE)
        speculation.propose_with(proposer, Shape(length, width))

    before = speculation.stats.num_accepted_tokens, speculation.stats.num_drafts
    outputs, timed = _timed(llm, prompts, sampling, prepare)
    accepted = speculation.stats.num_accepted_tokens - before[0]
    drafts = speculation.stats.num_drafts - before[1]
    assert all(list(output.outputs[0].token_ids) == [WORD] * tokens for output in outputs), (
        "an answer changed"
    )
    return {
        "batch": batch,
        "name": name,
        "acceptance_rate": acceptance_rate if length else None,
        **timed,
        "accepted_per_draft": accepted / drafts if drafts else 0.0,
    }


def _forked(llm: Any, shape: dict[str, Any], tokens: int, batch: int) -> Iterator[dict[str, Any]]:
    """FORKS samples and as many beams of each prompt, and beside them as many plain sequences."""
    from quire import SamplingParams
    from quire.speculate.adapt import Shape
    from quire_lab.baselines.synthetic_drafts import SyntheticProposer

    llm.engine.speculation.propose_with(SyntheticProposer({}, shape["vocab_size"], 0.0), Shape(0))
    drawn = SamplingParams(temperature=0.8, max_tokens=tokens, ignore_eos=True, seed=0)
    beams = SamplingParams(use_beam_search=True, n=FORKS, best_of=FORKS, max_tokens=tokens, ignore_eos=True)
    prompts = workloads.prompts([(PROMPT, tokens)] * batch * FORKS, shape["vocab_size"])
    for name, asked, sampling in (
        (f"{batch * FORKS} plain", prompts, drawn),
        (f"{batch} × n={FORKS}", prompts[:batch], drawn.changed(n=FORKS)),
        (f"{batch} × beam {FORKS}", prompts[:batch], beams),
    ):
        yield {"batch": batch, "name": name, **_timed(llm, asked, sampling)[1]}


def _timed(
    llm: Any, prompts: list[list[int]], sampling: Any, prepare: Callable[[], None] = lambda: None
) -> tuple[list[Any], dict[str, Any]]:
    """Answers, and the median of TIMED runs after one in which graphs are captured."""
    seconds = []
    for _ in range(1 + TIMED):
        prepare()
        steps = llm.engine.stats.num_steps
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    num_steps = llm.engine.stats.num_steps - steps
    num_tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    median = statistics.median(seconds[1:])
    return outputs, {
        "out_tok_s": num_tokens / median,
        "seconds": median,
        "all_seconds": seconds[1:],
        "num_steps": num_steps,
        "ms_per_step": 1e3 * median / num_steps,
    }


def _show(row: dict[str, Any]) -> None:
    print(
        f"{row['batch']:4} {row['name']:12} {row.get('acceptance_rate') or '':5} {row['out_tok_s']:10,.0f} tok/s "
        f"{row['ms_per_step']:8.3f} ms/step, {row.get('accepted_per_draft', 0.0):.2f} accepted",
        flush=True,
    )


# ---------------------------------------------------------------------- checks


def _check(device: str) -> dict[str, Any]:
    found = {"tokens": _check_tokens(device)}
    if device == "cuda":
        found["attention_error"] = _check_attention(device)
        found["settled"] = _check_settling(device)
    return found


def _check_tokens(device: str) -> float:
    """How many of a small model's answers, in full precision, have the same tokens with trees as without."""
    from quire import SamplingParams
    from quire.speculate.adapt import Shape
    from quire_lab.baselines.synthetic_drafts import SyntheticProposer

    with tempfile.TemporaryDirectory() as folder:
        llm = _engine(folder, TINY, device, dtype="float32", num_blocks=400, max_num_seqs=32)
        prompts = workloads.prompts([(40, 48)] * 16, TINY["vocab_size"])
        sampling = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        answers: list[list[list[int]]] = []
        for shape in (Shape(0), Shape(4, 3)):
            known = {
                (tuple(p), 0): a for p, a in zip(prompts, answers[0] if answers else [[0]] * 16, strict=True)
            }
            llm.engine.speculation.propose_with(SyntheticProposer(known, TINY["vocab_size"], 0.4, 0.8), shape)
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
        accepted = llm.engine.speculation.stats.num_accepted_tokens
        llm.close()
    same = sum(a == b for a, b in zip(*answers, strict=True)) / len(prompts)
    assert accepted > 0, "no tree was accepted"
    assert same > 0.8, f"trees changed answers: {same:.0%} are the same"
    return same


def _check_attention(device: str) -> float:
    """The largest difference between the kernel and the reference, in bf16, over trees beside decodes and a chunk."""
    import torch

    from quire.core.draft import ancestors, depths
    from quire.core.request import ints
    from quire.kernels.attention import reference, triton

    torch.manual_seed(0)
    parents = ints([-1, 0, 1, 2, -1, 4, 5, 6, -1, 8, 9, 10])
    contexts, queries, block_size = [700, 333, 90, 65, 4000], [13, 1, 40, 13, 13], 16
    tables = torch.randperm(400, device=device)[: 5 * 70].view(5, 70).int()
    tables = torch.cat((tables, torch.randint(1, 400, (5, 200), device=device).int()), 1)
    k, v = torch.randn(2, 400, block_size, 8, 128, device=device, dtype=torch.bfloat16)
    q = torch.randn(sum(queries), 32, 128, device=device, dtype=torch.bfloat16)
    starts, seen, positions = [], [], []
    for context, count in zip(contexts, queries, strict=True):
        base, is_tree = context - 12, count == 13
        starts += [base if is_tree else -1] * count
        seen += [0, *ancestors(parents)] if is_tree else [0] * count
        positions += (
            [base - 1, *(base + d for d in depths(parents))] if is_tree else range(context - count, context)
        )
    integers = {"dtype": torch.int32, "device": device}
    where = (
        torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], **integers),
        torch.tensor(contexts, **integers),
        tables,
    )
    masks = torch.tensor(starts, **integers), torch.tensor(seen, dtype=torch.int64, device=device)
    expected = reference.paged_attention(q, k, v, *where, 128**-0.5, 0, None, *masks)
    actual = triton.paged_attention(
        q, k, v, *where, 128**-0.5, 0, None, *masks, torch.tensor(positions, **integers)
    )
    error = float((actual.float() - expected.float()).abs().max())
    assert error < 0.03, f"tree attention is off by {error}"
    return error


def _check_settling(device: str) -> bool:
    """Paths, rows and pages come out as the reference has them."""
    import torch

    from quire.kernels.trees import reference, triton

    torch.manual_seed(0)
    parents = [-1, 0, 1, 2, -1, 4, 5, 6, -1, 8, 9, 10]
    trees = torch.tensor([[r, 30 + r, 13 * r, 12] for r in range(6)], dtype=torch.int32, device=device)
    nodes = torch.tensor([[list(range(12)), parents]] * 6, dtype=torch.int32, device=device)
    chosen = torch.tensor(
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [4, 99, 99, 99], [99] * 4, [8, 9, 99, 99]]
    )
    full = torch.full((6, 13), 99)
    for row, path in enumerate(chosen.tolist()):
        at = 0
        for token in path:
            full[row, at] = token
            at = token + 1 if token < 12 else at
    results = []
    pool = torch.randint(0, 255, (40, 8 * 16 * 64), dtype=torch.uint8, device=device)
    tables = torch.randperm(36, device=device).view(6, 6).int()
    for module in (reference, triton):
        mine, tokens = pool.clone(), torch.zeros(6, 96, dtype=torch.int32, device=device)
        module.settle(full.view(-1).to(device), trees, nodes, tokens, tables, [mine.view(40, 8, 16, 64)])
        results.append((mine, tokens))
    assert torch.equal(results[0][1], results[1][1]), "rows differ"
    assert torch.equal(results[0][0], results[1][0]), "pages differ"
    return True


if __name__ == "__main__":
    main()
