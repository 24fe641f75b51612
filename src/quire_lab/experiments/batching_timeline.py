"""Who occupies which slot when: one small workload under each batching policy, on the real engine."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.bench.drive import Bench
from quire.bench.figure import GREY, LOOKS
from quire.bench.lengths import Lengths
from quire_lab.baselines.timeline import DECODE, ENDED, PROMPT, Occupied, Timeline
from quire_lab.experiments.engines import opened, step_seconds, warm_up
from quire_lab.experiments.experiment import Setup
from quire_lab.experiments.load import serve_at

POLICIES = ("static", "dynamic", "continuous")
SLOTS = 4
PROMPT_TOKENS = 6
# answers' lengths and arrivals, in steps: three are there at once, the others come one by one
ANSWERS = (8, 15, 5, 10, 12, 6, 9, 7)
ARRIVALS = (0, 0, 0, 2, 5, 7, 9, 11)
WINDOW = 5  # of dynamic batching, in steps
COLORS = tuple("#808080" if one.color == "#000000" else one.color for one in LOOKS)  # an outline must show
_MERGED = 0.3  # gaps below this share of a step are the host's, not idleness


@dataclass(frozen=True, slots=True)
class Moment:
    """One step as it ran: seconds from the first request's arrival, and who was in it."""

    begins: float
    ends: float
    rows: Sequence[Occupied]


@dataclass(frozen=True, slots=True)
class Drawn:
    policy: str
    moments: list[Moment]
    seconds: float  # until the last answer was complete
    mean_latency: float
    busy_share: float  # of slots × time: spent on somebody's tokens
    ended_share: float  # spent on rows whose answer was over


def draw_timelines(setup: Setup, step: float | None = None) -> list[Drawn]:
    """The same requests under each policy; one step's time is measured first and sets the pace of arrivals."""
    found = []
    for policy in POLICIES:
        window = 1e3 * WINDOW * (step or 0.02)
        with opened(
            setup,
            batching=policy,
            batch_size=SLOTS,
            max_num_seqs=SLOTS,
            batch_window_ms=window,
            steps_in_flight=0,
        ) as bench:
            if step is None:
                with opened(setup, max_num_seqs=SLOTS, steps_in_flight=0) as pace:
                    warm_up(pace)
                    step = statistics.median(step_seconds(pace, SLOTS, 16, 12))
                return draw_timelines(setup, step)
            for _ in range(2):
                bench.serve(bench.requests([Lengths(PROMPT_TOKENS, 4)] * SLOTS))
            found.append(_run(bench, policy, step))
    return found


def _run(bench: Bench, policy: str, step: float) -> Drawn:
    engine = bench.engine
    requests = bench.requests([Lengths(PROMPT_TOKENS, count) for count in ANSWERS])
    timeline = Timeline.watch(engine)
    ends: list[float] = []
    started = engine.clock()

    def note() -> None:
        if len(timeline.steps) > len(ends):
            ends.append(engine.clock() - started)

    names = [f"S{place}" for place in range(1, len(ANSWERS) + 1)]
    loaded = serve_at(engine, requests, [step * at for at in ARRIVALS], on_step=note, names=names)
    timeline.stop()
    moments = [
        Moment(one.moment - started, end, one.rows) for one, end in zip(timeline.steps, ends, strict=True)
    ]
    total = SLOTS * loaded.seconds
    return Drawn(
        policy,
        moments,
        loaded.seconds,
        loaded.mean_latency,
        _held(moments, (PROMPT, DECODE)) / total,
        _held(moments, (ENDED,)) / total,
    )


def _held(moments: list[Moment], kinds: Sequence[str]) -> float:
    return sum((one.ends - one.begins) * sum(row.kind in kinds for row in one.rows) for one in moments)


def draw_figure(figure: Any, drawn: list[Drawn]) -> None:
    """A lane per slot, a colour and a name per request; hatched where a slot computes for nobody."""
    from matplotlib.patches import Patch

    axes = figure.subplots(len(drawn), 1, sharex=True)
    for axis, one in zip(axes, drawn, strict=True):
        for row in range(SLOTS):
            for name, kind, begins, ends in _spans(one.moments, row):
                number = int(name[1:]) - 1
                color = COLORS[number % len(COLORS)]
                style: dict[str, Any] = {"facecolor": color, "edgecolor": "white"}
                if kind == PROMPT:
                    style = {"facecolor": color, "edgecolor": "black", "linewidth": 1.2}
                if kind == ENDED:
                    style = {"facecolor": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0.5}
                axis.broken_barh([(1e3 * begins, 1e3 * (ends - begins))], (row - 0.4, 0.8), **style)
                if kind == DECODE:
                    dark = number % len(COLORS) in (0, 1, 2, 6)
                    axis.text(
                        1e3 * (begins + ends) / 2, row, name, ha="center", va="center", fontsize=8,
                        color="white" if dark else "black",
                    )  # fmt: skip
        axis.axvline(1e3 * one.seconds, color="black", linewidth=1, linestyle=":")
        axis.set_yticks(range(SLOTS), [str(i + 1) for i in range(SLOTS)])
        axis.set_ylim(SLOTS - 0.5, -0.5)
        axis.set_xlim(left=0)
        axis.grid(visible=False)
        axis.set_ylabel("slot")
        axis.set_title(
            f"{one.policy}: done after {1e3 * one.seconds:.0f} ms, {100 * one.busy_share:.0f} % of slot time used, "
            f"mean latency {1e3 * one.mean_latency:.0f} ms",
            loc="left",
            fontsize=9,
        )
    axes[-1].set_xlabel("milliseconds since the first request")
    figure.legend(
        handles=[
            Patch(facecolor="white", edgecolor="black", linewidth=1.2, label="outlined: computes the prompt"),
            Patch(facecolor=LOOKS[0].color, label="filled: generates"),
            Patch(
                facecolor="white",
                edgecolor=GREY,
                hatch="////",
                label="hatched: answer is over, slot still taken",
            ),
        ],
        loc="outside lower center",
        ncols=3,
    )


def _spans(moments: list[Moment], row: int) -> list[tuple[str, str, float, float]]:
    """A slot's steps joined where the same request goes on with the same."""
    spans: list[tuple[str, str, float, float]] = []
    for one in moments:
        found = next((held for held in one.rows if held.row == row), None)
        if found is None:
            continue
        begins = one.begins
        if spans:
            name, kind, first, last = spans[-1]
            if begins - last < _MERGED * (one.ends - one.begins):
                begins = last
                if (name, kind) == (found.request_id, found.kind):
                    spans[-1] = (name, kind, first, one.ends)
                    continue
        spans.append((found.request_id, found.kind, begins, one.ends))
    return spans
