"""Measures tiles of attention on this chip, and replaces the built-in ones only where others are surely faster."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels import registry
from quire.kernels.attention.tune_cases import LAYERS, SUBJECTS, Subject, TimedBatch, make_batch
from quire.kernels.attention.tuned import HeadShape, Measured, Tuned
from quire.kernels.attention.tuning import Tuning
from quire.kernels.timing import choose, graph_seconds, overall

WINDOW = 100  # windowed kernels are compiled apart: the chosen tiles must run in them too
MAX_ERROR = {2: 1e-2, 4: 1e-4}  # ‖difference‖ / ‖default's result‖, by the bytes of a number
MIN_FREE_BYTES = 512 << 20

Clock = Callable[[Callable[[], None]], float]  # seconds that the launches of a function take


def tune(
    heads: HeadShape,
    query_dtype: torch.dtype,
    device: str | torch.device,
    say: Callable[[str], None],
    *,
    subjects: Sequence[Subject] = SUBJECTS,
    clock: Clock | None = None,  # graph_seconds if None
    calls: int = LAYERS,
) -> Tuned:
    """Measures every subject; `say` is told about each candidate. Takes seconds, and a second per new kernel."""
    device = torch.device(device)
    _check(heads)
    chosen: dict[int, Tuning] = {}
    measured = []
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode():
        for subject in subjects:
            limit = _pool_bytes(device)
            batches = [make_batch(heads, query_dtype, one, device, limit) for one in subject.batches]
            chosen[subject.max_rows], line = _tune_one(subject, batches, clock or graph_seconds, calls, say)
            measured.append(line)
    prompts = chosen.pop(0)
    ranges = tuple((max_rows, _with_prompts(decodes, prompts)) for max_rows, decodes in chosen.items())
    return Tuned(ranges, tuple(measured))


def _tune_one(
    subject: Subject, batches: list[TimedBatch], clock: Clock, calls: int, say: Callable[[str], None]
) -> tuple[Tuning, Measured]:
    """The tiles for one subject, and how they compare."""
    candidates = _distinct(subject.candidates, batches[0])
    measure = partial(_times, batches=batches, clock=clock, calls=calls)
    times = _measured(subject, candidates, batches, measure, say)
    while best := choose(times):
        # The fastest of many was also lucky: alone against the default, it must win once more.
        again = _alternated(candidates[0], candidates[best], measure)
        reason = "not faster when measured again" if not choose(again) else ""
        reason = reason or _window_fault(candidates[best], candidates[0], batches)
        if not reason:
            default_us, best_us = overall(again[0]) * 1e6, overall(again[1]) * 1e6
            words = subject.words(candidates[best])
            return candidates[best], Measured(subject.what, default_us, best_us, words)
        say(f"{subject.what}: {subject.words(candidates[best])}: passed over, {reason}")
        del times[best]
    default_us, best_us = overall(times[0]) * 1e6, min(map(overall, times.values())) * 1e6
    return candidates[0], Measured(subject.what, default_us, best_us, "default")


def _measured(
    subject: Subject,
    candidates: list[Tuning],
    batches: list[TimedBatch],
    measure: Callable[[Tuning], list[float]],
    say: Callable[[str], None],
) -> dict[int, list[list[float]]]:
    """Times of each candidate that runs and gives what the default gives."""
    expected = [batch.result(candidates[0]) for batch in batches]
    times: dict[int, list[list[float]]] = {}
    for index, tuning in enumerate(candidates):
        where = f"{subject.what}, {index + 1} of {len(candidates)}: {subject.words(tuning)}"
        reason = _fault(tuning, batches, expected) if index else ""
        if reason:
            say(f"{where}: passed over, {reason}")
            continue
        times[index] = [measure(tuning)]
        say(f"{where}: {overall(times[index]) * 1e6:.2f} µs")
    # Backwards, so that a drifting clock cannot favour one twice.
    for index in reversed(times):
        times[index].append(measure(candidates[index]))
    return times


def _alternated(
    default: Tuning, other: Tuning, measure: Callable[[Tuning], list[float]]
) -> dict[int, list[list[float]]]:
    """Two fresh rounds of the two alone, as `choose` takes them."""
    first = measure(default), measure(other)
    last = measure(other), measure(default)
    return {0: [first[0], last[1]], 1: [first[1], last[0]]}


def _distinct(candidates: tuple[Tuning, ...], batch: TimedBatch) -> list[Tuning]:
    """Without those that are the same for these heads: wide ones get smaller tiles."""
    plans = registry.load("attention", "triton_plan")
    head_dim, dtype = batch.q.shape[2], batch.q.dtype
    seen: dict[Tuning, Tuning] = {}
    for tuning in candidates:
        seen.setdefault(plans.fitted(tuning, head_dim, dtype), tuning)
    return list(seen.values())


def _times(tuning: Tuning, batches: list[TimedBatch], clock: Clock, calls: int) -> list[float]:
    """Seconds per layer on each batch. Every layer of a pool is read before one is read again."""
    seconds = []
    for batch in batches:
        num_calls = max(calls, batch.pool.shape[1])
        seconds.append(clock(batch.launches(tuning, num_calls)) / num_calls)
    return seconds


def _fault(tuning: Tuning, batches: list[TimedBatch], expected: list[Tensor], window: int = 0) -> str:
    """Why these tiles cannot serve; empty if they can. What does not fit the chip is no error, others may."""
    for batch, wanted in zip(batches, expected, strict=True):
        try:
            found = batch.result(tuning, window)
        except Exception as fault:  # compilers and drivers have many
            return (str(fault).splitlines() or [type(fault).__name__])[0][:100]
        error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
        if not error <= MAX_ERROR[found.dtype.itemsize]:
            return f"its results are off by {error:.1e}"
    return ""


def _window_fault(tuning: Tuning, default: Tuning, batches: list[TimedBatch]) -> str:
    return _fault(tuning, batches[:1], [batches[0].result(default, WINDOW)], WINDOW)


def _with_prompts(decodes: Tuning, prompts: Tuning) -> Tuning:
    names = [field.name for field in fields(Tuning) if field.name.startswith("prompt_")]
    return replace(decodes, **{name: getattr(prompts, name) for name in names})


def _check(heads: HeadShape) -> None:
    limit = registry.load("attention", "triton").MAX_HEAD_DIM
    if heads.head_dim > limit:
        raise ConfigError(f"heads of {heads.head_dim} are too wide for these kernels, which go up to {limit}")


def _pool_bytes(device: torch.device) -> int:
    """What each batch's pool may take, so that a subject's four fit, and numbers that are drawn and converted."""
    if device.type != "cuda":
        return MIN_FREE_BYTES
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if free < MIN_FREE_BYTES:
        raise ConfigError(
            f"only {free >> 20} MiB of GPU memory are free: stop what else runs there, its load would falsify times"
        )
    return free // 8
