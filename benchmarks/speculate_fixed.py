"""What `--deterministic` promises of speculation on a GPU: `python benchmarks/speculate_gpu.py --only deterministic`.

A query of a token tree has the bits of a decode and of a chain's query over the same tokens, in every type and over
borders of tiles (64 positions) and chunks (512). And a small model's greedy tokens and logprobs are the same, bit for
bit, with trees and with chains as without drafts, in batches of several sizes. On a CPU only the second part runs.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import workloads

SHAPE = {
    **workloads.SHAPES["smol135m"],
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
PARENTS = [-1, 0, 1, 2, -1, 4, 5, 6, 5, 8, 9, -1, 11, 12]
TOKENS = 40


def check(device: str) -> dict[str, Any]:
    """What was compared, and under `failures` a line for everything that differs."""
    failures: list[str] = []
    found: dict[str, Any] = {"failures": failures}
    if device == "cuda":
        found["queries"] = sum(
            check_queries(device, dtype, base, window, failures)
            for dtype in ("bfloat16", "float16", "float32")
            for base, window in ((1, 0), (60, 0), (505, 0), (700, 0), (700, 100), (2040, 0))
        )
    dtypes = ("bfloat16", "float32") if device == "cuda" else ("auto",)
    found["tokens"] = {dtype: _check_tokens(device, dtype, failures) for dtype in dtypes}
    return found


def _check_tokens(device: str, dtype: str, failures: list[str]) -> int:
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
            for i, (one, other) in enumerate(zip(plain, drafted, strict=True)):
                for what, mine, others in zip(("token", "logprobs"), one, other, strict=True):
                    places = [
                        j for j, pair in enumerate(zip(mine, others, strict=True)) if pair[0] != pair[1]
                    ]
                    if places:
                        failures.append(f"{dtype}, {shape}, prompt {i}: another {what} from {places[0]} on")
                compared += len(one[0])
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
    from quire.core.ints import ints
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
    found = attend(q, context, table, *masks)
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
            if not torch.equal(plain, found[asked[-count:]]):
                most = float((plain.float() - found[asked[-count:]].float()).abs().max())
                failures.append(
                    f"{dtype}, base {base}, window {window}, node {leaf}, {count} queries: {most:.2e} apart"
                )
            compared += count
    return compared
