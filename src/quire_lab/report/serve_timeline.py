"""The time line of `bench serve`: streams and engine steps on one clock, and the step that held each late token up."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from quire.bench.report import BenchReport, percentile
from quire.bench.serve import EngineStep, Round, Served
from quire.bench.table import aligned
from quire.core.errors import ConfigError

WORST = 10  # gaps of the table
LATE_PERCENT = 99.0  # gaps above this percentile are late
MIN_SHARE = 0.5  # of a gap: a step that covers less of it is not its cause
MAX_STREAMS = 400  # drawn
_WIDTH, _LEFT, _ROW = 1600, 60, 6


@dataclass(frozen=True, slots=True)
class LateToken:
    """A gap between two pieces of a stream that is longer than most."""

    stream: int  # number of the request in its round
    begins: float  # seconds from the round's first request
    seconds: float
    step: EngineStep | None  # that covers the largest part of the gap
    share: float  # of the gap that the step covers

    @property
    def cause(self) -> str:
        if self.step is None or self.share < MIN_SHARE:
            return "no single step: HTTP, link, client, or several steps"
        kind = "prefill and decode" if self.step.num_decode_rows else "prefill"
        return kind if self.step.num_prefill_tokens else "decode"


def late_tokens(run: Round, steps: Sequence[EngineStep]) -> list[LateToken]:
    """All gaps above the percentile, the longest first."""
    streams = token_times(run)
    gaps = sorted(later - earlier for times in streams for earlier, later in pairwise(times))
    if not gaps:
        return []
    limit, origin = percentile(gaps, LATE_PERCENT), _origin(run)
    ends = [step.ended for step in steps]
    late = []
    for number, times in enumerate(streams):
        for earlier, later in pairwise(times):
            if later - earlier > limit:
                step, share = _covering(steps, ends, earlier, later)
                late.append(LateToken(number, earlier - origin, later - earlier, step, share))
    return sorted(late, key=lambda token: -token.seconds)


def token_times(run: Round) -> list[list[float]]:
    """When each piece of each request came; empty for a request without any."""
    return [
        [] if outcome.first_token is None else list(accumulate(outcome.gaps, initial=outcome.first_token))
        for outcome in run.outcomes
    ]


def _origin(run: Round) -> float:
    return min(outcome.sent for outcome in run.outcomes)


def _covering(
    steps: Sequence[EngineStep], ends: Sequence[float], earlier: float, later: float
) -> tuple[EngineStep | None, float]:
    best, most = None, 0.0
    for index in range(bisect_right(ends, earlier), len(steps)):
        step = steps[index]
        if step.started >= later:
            break
        covered = min(step.ended, later) - max(step.started, earlier)
        if covered > most:
            best, most = step, covered
    return best, most / (later - earlier)


def timeline_table(late: Sequence[LateToken]) -> str:
    head = [
        "at, s",
        "stream",
        "gap, ms",
        "step",
        "step, ms",
        "prefill tokens",
        "decode rows",
        "share",
        "held up by",
    ]
    rows = [
        [
            f"{token.begins:.3f}",
            str(token.stream),
            f"{1e3 * token.seconds:.1f}",
            *(
                ("–",) * 5
                if token.step is None
                else (
                    str(token.step.step_id),
                    f"{1e3 * token.step.seconds:.1f}",
                    f"{token.step.num_prefill_tokens:,}",
                    str(token.step.num_decode_rows),
                    f"{token.share:.0%}",
                )
            ),
            token.cause,
        ]
        for token in late[:WORST]
    ]
    return aligned([head, *rows], right=range(len(head) - 1))


def timeline_record(late: Sequence[LateToken]) -> list[dict[str, Any]]:
    """For programs: every late token."""
    return [
        {
            "stream": token.stream,
            "begins_seconds": token.begins,
            "gap_ms": 1e3 * token.seconds,
            "step_id": None if token.step is None else token.step.step_id,
            "share": token.share,
            "held_up_by": token.cause,
        }
        for token in late
    ]


def check_timeline(path: str) -> None:
    """ConfigError for a name that does not say what to write, before anything is measured."""
    if Path(path).suffix not in (".svg", ".html"):
        raise ConfigError(f"--timeline {path}: give a name that ends in .html or .svg")


def with_timeline(report: BenchReport, served: Served, path: str) -> BenchReport:
    """Writes the last round as a picture; returns the report with its late tokens."""
    run = served.rounds[-1]
    late = late_tokens(run, served.steps)
    table = timeline_table(late)
    text = timeline_svg(run, served.steps, late)
    if path.endswith(".html"):
        title = escape(f"{served.model or 'server'}: {served.workload.source}")
        text = f"<!doctype html><meta charset=utf-8><title>{title}</title><pre>{escape(table)}</pre>{text}\n"
    try:
        Path(path).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--timeline {path}: cannot be written ({error})") from error
    title = f"the longest of {len(late)} gaps above p{LATE_PERCENT:g}, and the steps in them (last rate)"
    results = {**report.results, "late_tokens": timeline_record(late)}
    return replace(report, results=results, notes=[*report.notes, "", title, table])


def timeline_svg(run: Round, steps: Sequence[EngineStep], late: Sequence[LateToken]) -> str:
    """A line per stream with a mark per token; behind them the steps, darker with more prefill; late gaps in red."""
    origin = _origin(run)
    scale = (_WIDTH - _LEFT) / max(run.seconds, 1e-9)
    streams = token_times(run)[:MAX_STREAMS]
    height = _ROW * len(streams) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="10">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    most = max((step.num_prefill_tokens for step in steps), default=0) or 1
    for step in steps:
        if step.ended < origin or step.started > origin + run.seconds:
            continue
        color, strength = (
            ("#E69F00", 0.25 + 0.75 * step.num_prefill_tokens / most)
            if step.num_prefill_tokens
            else ("#0072B2", 0.15)
        )
        parts.append(
            f'<rect x="{_LEFT + scale * (step.started - origin):.2f}" y="0" width="{scale * step.seconds:.2f}" '
            f'height="{height - 20}" fill="{color}" fill-opacity="{strength:.2f}"><title>step {step.step_id}: '
            f"{1e3 * step.seconds:.1f} ms, {step.num_prefill_tokens} prefill tokens, {step.num_decode_rows} decode rows"
            "</title></rect>"
        )
    for number, times in enumerate(streams):
        marks = "".join(
            f"M{_LEFT + scale * (at - origin):.1f} {_ROW * number + 2}v{_ROW - 2}" for at in times
        )
        parts.append(f'<path d="{marks}" stroke="black" stroke-width="0.6"/>')
    for token in late:
        if token.stream < MAX_STREAMS:
            parts.append(
                f'<rect x="{_LEFT + scale * token.begins:.2f}" y="{_ROW * token.stream + 3}" '
                f'width="{scale * token.seconds:.2f}" height="{_ROW - 3}" fill="#C00000"/>'
            )
    for tick in range(11):
        at = run.seconds * tick / 10
        parts.append(
            f'<text x="{_LEFT + scale * at:.0f}" y="{height - 6}" text-anchor="middle">{at:.2f} s</text>'
        )
    parts.append(
        f'<text x="2" y="10">streams</text><text x="2" y="{height - 24}">'
        "steps: blue decode, orange with prefill; red: late</text></svg>"
    )
    return "\n".join(parts)
