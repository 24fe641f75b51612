"""Checks of the sampling kernel against the reference, with the same random numbers. For `small_kernels_gpu.py`.

Every case is drawn with fresh logits several times, and each time twice: a result that moves is a race. Sums in fp32
may put a number that falls between two tokens, or a token at the filter's edge, on the other side than the reference's
fp64 does: then the drawn token is a neighbour, and such rows are counted apart. Any other is explained.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.sampling import SamplingParams
from quire.kernels import registry
from quire.kernels.sample import triton as sample_kernel
from quire.sampling.columns import DeviceColumns, SamplingColumns, uniforms

GREEDY = SamplingParams(temperature=0.0)
TOP_P = SamplingParams(temperature=0.8, top_p=0.95)
TOP_K = SamplingParams(temperature=0.8, top_k=50)
PLAIN = SamplingParams(temperature=0.8)
MIXES = (
    GREEDY, TOP_P, TOP_K, PLAIN,
    SamplingParams(temperature=1.3, top_p=0.7), SamplingParams(temperature=1.0, top_k=5000, top_p=0.9),
    SamplingParams(temperature=0.7, min_p=0.05), SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01),
)  # fmt: skip
ROWS = 48
NEAR = 1e-6  # of the whole weight
MOST_NEAR = 0.1  # of the rows

Check = Callable[[str, bool, str], None]


@dataclass
class Draw:
    """Inputs and outputs of one call of the fused kernel."""

    logits: Tensor
    columns: SamplingColumns
    device_columns: DeviceColumns
    rows: Tensor
    positions: Tensor
    token_ids: Tensor
    tokens: Tensor
    finite: Tensor

    def __call__(self) -> None:
        sample_kernel.sample_rows(
            self.logits,
            self.rows,
            self.positions,
            self.device_columns,
            self.token_ids,
            self.tokens,
            self.finite,
        )

    def numbers(self) -> np.ndarray:
        return uniforms(self.columns.token_key, self.positions.cpu().numpy().astype(np.int64))


def columns_of(
    params: list[SamplingParams], vocabulary: int, device: torch.device, seed: int = 0
) -> tuple[SamplingColumns, DeviceColumns]:
    columns = SamplingColumns(len(params), vocabulary)
    for row, sampling in enumerate(params):
        columns.start_row(row, sampling, seed=row * 7919 + seed + 1, sample_index=0, num_prompt_tokens=4)
    on_device = DeviceColumns(columns, device)
    on_device.update(np.arange(len(params)))
    return columns, on_device


def draw_of(logits: Tensor, params: list[SamplingParams], seed: int = 0) -> Draw:
    count, device = len(logits), logits.device
    columns, on_device = columns_of(params, logits.shape[1], device, seed)
    return Draw(
        logits, columns, on_device,
        torch.arange(count, dtype=torch.int32, device=device),
        torch.randint(4, 60, (count,), dtype=torch.int32, device=device),
        torch.full((count, 64), -7, dtype=torch.int32, device=device),
        torch.full((count,), -7, dtype=torch.int64, device=device),
        torch.zeros(count, dtype=torch.bool, device=device),
    )  # fmt: skip


def logits_of(kind: str, vocabulary: int, device: torch.device) -> Tensor:
    """[ROWS, V] fp32 logits of one kind."""
    flat = torch.randn(ROWS, vocabulary, device=device)
    if kind == "flat":
        return flat * 0.5
    if kind == "peaked":
        return flat * 4.0
    if kind == "crowded":  # more equals than a list holds
        return (flat * 2.0).round() * 0.5
    if kind == "hidden":  # far above all that a sample of the row sees
        flat[:, vocabulary // 2 + 57 : vocabulary // 2 + 77] += 100.0
        return flat
    if kind == "banned":
        flat[:, : vocabulary // 3] = -torch.inf
        flat[:, vocabulary // 3 + 40 :] = -torch.inf
        return flat
    assert kind == "striped", kind
    flat[:, ::3] = -torch.inf
    return flat * 2.0


KINDS = ("flat", "peaked", "crowded", "hidden", "banned", "striped")


@dataclass
class KeptTokens:
    """What the reference keeps of one row: fp64 weights, 0 where filtered, and their sums by rising id."""

    weights: np.ndarray
    sums: np.ndarray

    @property
    def total(self) -> float:
        return float(self.sums[-1])

    def bounds(self, token: int) -> tuple[float, float]:
        """The numbers for which this token is drawn."""
        if not 0 <= token < len(self.sums):
            return np.nan, np.nan
        return float((self.sums[token] - self.weights[token]) / self.total), float(
            self.sums[token] / self.total
        )


def kept_of(logits: np.ndarray, params: SamplingParams) -> KeptTokens:
    """As the reference filters, for one row, in fp64."""
    scaled = (logits / np.float32(params.temperature)).astype(np.float32)
    weights = np.exp(scaled.astype(np.float64) - float(scaled.max()))
    weights[weights < np.float32(params.min_p)] = 0.0
    order = np.argsort(-weights, kind="stable")
    falling = weights[order]
    if params.top_k > 0:
        falling[params.top_k :] = 0.0
    if params.top_p < 1:
        sums = np.cumsum(falling)
        dropped = sums - falling >= float(np.float32(params.top_p)) * sums[-1]
        dropped[0] = False
        falling[dropped] = 0.0
    kept = np.zeros_like(weights)
    kept[order] = falling
    return KeptTokens(kept, np.cumsum(kept))


def is_neighbour(kept: KeptTokens, number: float, expected: int, found: int, params: SamplingParams) -> bool:
    """Whether the last bits of a sum explain another token than the expected one."""
    between = kept.weights[min(expected, found) + 1 : max(expected, found)]
    edge = float(kept.weights[kept.weights > 0].min() / kept.total)  # a token at top-p's edge, kept or not
    near = NEAR + (edge if params.top_p < 1 else 0.0)
    low, high = kept.bounds(expected)
    return found >= 0 and not between.any() and min(number - low, high - number) < near


def explained(draw: Draw, row: int, expected: int, params: SamplingParams) -> str:
    """All there is to know of a wrong row."""
    logits = draw.logits[row].float().cpu().numpy()
    drawn, number = int(draw.tokens[row]), float(draw.numbers()[row])
    lines = [f"row {row}: {params}", f"  number {number!r}, finite {bool(draw.finite[row])}"]
    if params.temperature > 0:
        kept = kept_of(logits, params)
        lines.append(f"  kept {int((kept.weights > 0).sum())} of {len(logits)}, smallest kept logit "
                     f"{logits[kept.weights > 0].min()!r}, largest logit {logits.max()!r}")  # fmt: skip
    for name, token in (("expected", expected), ("found", drawn)):
        if not 0 <= token < len(logits):
            lines.append(f"  {name} {token}: not a token")
            continue
        line = f"  {name} {token}: logit {logits[token]!r}, rank {int((logits > logits[token]).sum()) + 1}"
        if params.temperature > 0:
            low, high = kept.bounds(token)
            line += f", {'kept' if kept.weights[token] > 0 else 'filtered'}, drawn for [{low!r}, {high!r})"
        lines.append(line)
    return "\n".join(lines)


def check_case(check: Check, label: str, logits: Tensor, seed: int) -> int:
    """One draw of all mixes, twice. Returns how many rows drew a neighbour."""
    params = [MIXES[i % len(MIXES)] for i in range(len(logits))]
    draw = draw_of(logits, params, seed)
    draw()
    first = draw.tokens.clone(), draw.finite.clone()
    draw.token_ids.fill_(-7)
    draw()
    moved = (first[0] != draw.tokens) | (first[1] != draw.finite)
    check(label, not bool(moved.any()), f"rows {moved.nonzero().flatten().tolist()} moved on equal inputs")
    columns = draw.columns
    inputs = (columns.temperature, columns.top_k, columns.top_p, columns.min_p, draw.numbers())
    expected = registry.load("sample", "reference").sample_filtered(
        logits.float(), *(torch.from_numpy(value).to(logits.device) for value in inputs)
    )
    written = draw.token_ids.gather(1, draw.positions.long()[:, None]).squeeze(1)
    check(label, torch.equal(written, draw.tokens.int()), "not written to the rows")
    marked = (~draw.finite).nonzero().flatten().tolist()
    check(label, not marked, f"finite rows {marked} were marked")
    near, wrong = 0, []
    for row in (draw.tokens != expected).nonzero().flatten().tolist():
        wanted, token = int(expected[row]), int(draw.tokens[row])
        fine = False
        if params[row].temperature > 0 and bool(draw.finite[row]):
            kept = kept_of(logits[row].float().cpu().numpy(), params[row])
            fine = is_neighbour(kept, float(draw.numbers()[row]), wanted, token, params[row])
        near += fine
        wrong += [] if fine else [row]
    if wrong:
        print(explained(draw, wrong[0], int(expected[wrong[0]]), params[wrong[0]]), flush=True)
    mixes = sorted({row % len(MIXES) for row in wrong})
    check(label, not wrong, f"{len(wrong)} of {len(logits)} tokens are wrong, of the mixes {mixes}")
    return near


def check_draws(
    check: Check,
    device: torch.device,
    vocabularies: tuple[int, ...] = (128256, 49152, 50257, 1000),
    repeats: int = 4,
) -> None:
    """Every mix of filters, kind of logits, vocabulary and type; fresh logits each time."""
    for vocabulary in vocabularies:
        near = rows = 0
        for dtype in (torch.float32, torch.bfloat16):
            for kind in KINDS:
                for repeat in range(repeats):
                    label = f"sample_rows V {vocabulary} {str(dtype)[6:]} {kind}, draw {repeat}"
                    near += check_case(
                        check, label, logits_of(kind, vocabulary, device).to(dtype), repeat * 1000
                    )
                    rows += ROWS
        print(
            f"sample_rows V {vocabulary}: {near} of {rows} rows drew a neighbour of the expected token",
            flush=True,
        )
        check(f"sample_rows V {vocabulary}", near <= MOST_NEAR * rows, f"{near} of {rows} drew a neighbour")


def check_failures(check: Check, device: torch.device, vocabulary: int = 128256, count: int = 20000) -> None:
    """Rows that cannot be sampled are marked, padding is left alone, and the draw follows the distribution."""
    logits = torch.randn(6, vocabulary, device=device)
    logits[0, 77], logits[1, 99], logits[2] = torch.nan, torch.inf, -torch.inf
    for params in (GREEDY, TOP_P, PLAIN):
        draw = draw_of(logits.clone(), [params] * 6)
        draw.rows[5] = -1
        draw()
        finite = draw.finite.tolist()
        check("finite", finite == [False] * 3 + [True] * 2 + [False], str(finite))
        check("token 0 of failed rows", draw.tokens[:3].tolist() == [0, 0, 0], str(draw.tokens.tolist()))
        check("padding", int(draw.tokens[5]) == -7, str(int(draw.tokens[5])))
    base = torch.randn(64, device=device) * 2
    params = SamplingParams(temperature=0.9, top_p=0.9)
    draw = draw_of(base.expand(count, 64).contiguous(), [params] * count)
    draw()
    kept = torch.from_numpy(kept_of(base.cpu().numpy(), params).weights)
    expected = kept / kept.sum() * count
    observed = torch.bincount(draw.tokens.cpu(), minlength=64).double()
    cells = expected > 5
    chi_square = float(((observed - expected)[cells] ** 2 / expected[cells]).sum())
    freedom = int(cells.sum())
    check("draws outside the kept set", bool((observed[kept == 0] == 0).all()), "")
    check("distribution", chi_square < freedom + 4.5 * (2 * freedom) ** 0.5, f"{chi_square} of {freedom}")
