"""What the simulated part of `adapters` found: tables, a picture, ratios beside the published ones."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.figure import GREY, Picture, line_style, plain_log
from quire_lab.experiments.adapters_simulated import (
    COUNTS,
    IN_TIME,
    LONGEST,
    MERGING,
    MIXED,
    MODES,
    PUBLISHED,
    RATE,
    SHORTEST,
    Case,
    Simulated,
)
from quire_lab.experiments.experiment import Check, Finding, Setup, Table
from quire_lab.experiments.simulated import basis
from quire_lab.simulate.adapters import DISK_BANDWIDTH
from quire_lab.simulate.devices import find_device

Found = Mapping[Case, Simulated]
COUNTERPART = {"unified": "S-LoRA", "merge, static": "PEFT"}  # whose published figures stand beside whose
FLAT = 0.8  # of the throughput with few adapters: what is called flat here


def simulated_finding(
    setup: Setup, simulated: Sequence[Simulated], settings: Mapping[str, Any], num_requests: tuple[int, int]
) -> Finding:
    found = {one.case: one for one in simulated}
    counts = sorted({case.num_adapters for case in found if case.rate == RATE})
    few, many = (found[Case("unified", count, MIXED)] for count in (counts[0], counts[-1]))
    merged = found[Case("merge", counts[-1], MIXED)]
    flat = many.requests_per_second / few.requests_per_second
    times = many.requests_per_second / merged.requests_per_second
    where = f"{settings['model']} on {find_device(str(settings['device'])).title}, simulated"
    take_away = (
        f"{where}: {many.case.num_adapters:,} adapters are served at {flat:.0%} of the throughput of "
        f"{few.case.num_adapters} (published: 90 to 95 % of 5), {times:.0f} × as much as by merging one after another "
        "(published, over PEFT: up to 30 ×)."
    )
    return Finding(
        take_away,
        [_at_rate(found), _at_once(found), _ratios(found, counts), *_skew(found)],
        [_picture(found, counts, where)],
        {"runs": [one.as_dict() for one in simulated]},
        {"seed": setup.seed, "engine": dict(settings), "num_requests": num_requests},
        [
            Check(
                f"simulated: throughput stays nearly flat, {FLAT:.0%} or more from {counts[0]} adapters to "
                f"{counts[-1]:,}",
                f"{few.requests_per_second:.2f} and {many.requests_per_second:.2f} requests a second",
                flat >= FLAT,
            ),
            Check(
                "simulated: batched adapters serve more than merged ones, however many there are",
                f"{times:.0f} × with {counts[-1]:,}",
                all(
                    one.requests_per_second
                    > found[Case("merge", case.num_adapters, case.ranks)].requests_per_second
                    for case, one in found.items()
                    if case == Case("unified", case.num_adapters, case.ranks)
                ),
            ),
        ],
        [*basis(settings), *_notes(settings, num_requests)],
    )


def _notes(settings: Mapping[str, Any], num_requests: tuple[int, int]) -> list[str]:
    fit = find_device(str(settings["device"])).lora_fit
    fitted = (
        f"products of adapters: four factors fitted on {fit['on']} to {fit['num_samples']} shapes of their kernels; "
        f"relative error held out: median {fit['held_out_median_error']:.0%}, p90 {fit['held_out_p90_error']:.0%}"
        if fit
        else "products of adapters: no factor was fitted, they are charged as dense layers"
    )
    return [
        fitted,
        "assumed, not fitted: loads at the host link's rate beside the pass; a merge reads and writes the touched "
        f"weights once to take an adapter out and once to put one in; disks at {DISK_BANDWIDTH / 1e9:g} GB/s (here all "
        "adapters are in host memory, as in the paper)",
        f"{num_requests[0]} requests of {SHORTEST} to {LONGEST} tokens in and out, {num_requests[1]} where adapters "
        f"are merged, which has too much to do from the first second on; Poisson arrivals, {RATE:g} a second; adapters "
        f"on q, k, v and o, drawn in proportion to i^-x; in time: a first token within {IN_TIME:g} s",
        "separate: a quarter of the pool is adapters' alone; merge: one adapter in the weights at a time, its requests "
        "batched continuously; merge, static: the same in static batches of 32, the nearest here to the paper's PEFT; "
        "vLLM-packed, a whole copy of the model for each adapter, is not simulated",
    ]


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


def _published(case: Case) -> str:
    name = COUNTERPART.get(case.mode, "")
    value = PUBLISHED.get(name, {}).get(case.ranks, {}).get(case.num_adapters)
    return "" if value is None else f"{name} {value:.2f}"


def _at_rate(found: Found) -> Table:
    rows = [
        [
            _ranks(case.ranks),
            f"{case.num_adapters:,}",
            case.mode,
            f"{one.requests_per_second:.2f}",
            _published(case),
            f"{one.tokens_per_second:,.0f}",
            f"{one.first_token:,.2f}",
            f"{one.attained:.0%}",
            f"{one.mean_running:.0f}",
            f"{one.loads:,}",
        ]
        for case, one in found.items()
        if case.rate == RATE and case.exponent == 1.0
    ]
    head = ["ranks", "adapters", "adapters are", "requests/s", "published", "tokens/s"]
    head += ["first token, s", "in time", "running", "loads"]
    return Table(f"Simulated: {RATE:g} requests a second", head, rows, left=3)


def _at_once(found: Found) -> Table:
    rows = [
        [
            (case.device or "").removeprefix("simulated:"),
            _ranks(case.ranks),
            f"{case.num_adapters:,}",
            case.mode,
            f"{one.requests_per_second:.2f}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.mean_running:.0f}",
            f"{one.loads:,}",
            f"{one.evictions:,}",
            f"{one.num_preemptions:,}",
        ]
        for case, one in found.items()
        if math.isinf(case.rate)
    ]
    head = ["other device", "ranks", "adapters", "adapters are", "requests/s", "tokens/s"]
    head += ["running", "loads", "evictions", "preempted"]
    return Table("Simulated: all at once, what the device can do", head, rows, left=4)


def _ratios(found: Found, counts: Sequence[int]) -> Table:
    """Throughputs, beside those of the paper wherever it has both."""
    rows = []
    for ranks in dict.fromkeys(case.ranks for case in found):
        published = PUBLISHED["S-LoRA"].get(ranks, {})
        few, many = (found[Case("unified", count, ranks)] for count in (counts[0], counts[-1]))
        ours = many.requests_per_second / few.requests_per_second
        theirs = f"{published[counts[-1]] / published[counts[0]]:.2f}"
        rows.append([_ranks(ranks), f"{counts[-1]:,} adapters ÷ {counts[0]}", f"{ours:.2f}", theirs])
        for mode in MERGING:
            for count in counts:
                other = found.get(Case(mode, count, ranks))
                if other is None:
                    continue
                ours = found[Case("unified", count, ranks)].requests_per_second / other.requests_per_second
                peft = PUBLISHED["PEFT"][ranks].get(count) if mode == "merge, static" else None
                theirs = "" if peft is None else f"{published[count] / peft:.1f} over PEFT"
                rows.append([_ranks(ranks), f"unified ÷ {mode}, {count:,} adapters", f"{ours:.1f}", theirs])
    rows.append(["", "over vLLM-packed, as many adapters as fit", "not simulated", "up to 4"])
    return Table("Simulated: ratios of throughput", ["ranks", "ratio", "here", "published"], rows, left=2)


def _skew(found: Found) -> list[Table]:
    cases = [case for case in found if case.rate == RATE and case.mode in ("unified", "separate")]
    exponents = sorted({case.exponent for case in cases})
    if len(exponents) == 1:
        return []
    rows = []
    for exponent in exponents:
        for mode in ("unified", "separate"):
            one = found[Case(mode, COUNTS[-1], MIXED, exponent=exponent)]
            rows.append(
                [
                    f"i^-{exponent:g}",
                    mode,
                    f"{one.requests_per_second:.2f}",
                    f"{one.first_token:.2f}",
                    f"{one.attained:.0%}",
                    f"{one.loads:,}",
                    f"{one.evictions:,}",
                ]
            )
    head = ["drawn by", "adapters are", "requests/s", "first token, s", "in time", "loads", "evictions"]
    title = f"Simulated: skew, {COUNTS[-1]:,} adapters of ranks {_ranks(MIXED)}"
    return [Table(title, head, rows, left=2)]


def _picture(found: Found, counts: Sequence[int], where: str) -> Picture:
    most = found[Case("unified", counts[-1], MIXED)]
    return Picture(
        "adapters-simulated",
        f"Many adapters: {where}",
        f"{counts[-1]:,} adapters of ranks {_ranks(MIXED)}: {most.requests_per_second:.1f} requests a second, "
        f"{most.attained:.0%} of first tokens within {IN_TIME:g} s.",
        lambda figure: _draw(figure, found, counts),
        width=11.0,
    )


def _draw(figure: Any, found: Found, counts: Sequence[int]) -> None:
    panels = figure.subplots(1, 3)
    values = (
        ("requests per second", lambda one: one.requests_per_second),
        ("first token, s (mean)", lambda one: one.first_token),
        ("first tokens in time, %", lambda one: 100 * one.attained),
    )
    for panel, (label, value) in zip(panels, values, strict=True):
        for series, mode in enumerate(MODES):
            line = [found[case] for count in counts if (case := Case(mode, count, MIXED)) in found]
            at = [one.case.num_adapters for one in line]
            panel.plot(at, [value(one) for one in line], label=mode, **line_style(series))
        panel.set(xlabel="adapters", ylabel=label)
        plain_log(panel, "x")
    for name, marker in (("S-LoRA", "*"), ("PEFT", "x")):
        published = {n: value for n, value in PUBLISHED[name][MIXED].items() if n in counts}
        panels[0].plot(
            list(published), list(published.values()), marker, color=GREY, label=f"{name}, published"
        )
    plain_log(panels[1], "y")
    panels[0].set_ylim(bottom=0)
    panels[2].set_ylim(0, 105)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6)
