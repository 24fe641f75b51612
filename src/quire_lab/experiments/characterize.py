"""`characterize`: a grid of 500 equal requests over batching, paging, output lengths, rates, models and devices."""

import math
from collections.abc import Mapping
from typing import Any

from quire_lab.experiments.characterize_figure import pictures, tables
from quire_lab.experiments.characterize_grid import (
    BATCHING,
    DEVICES,
    INPUT,
    POSITIONS,
    Gain,
    Job,
    Measured,
    cells,
    gains,
    measure,
)
from quire_lab.experiments.experiment import Check, Experiment, Finding, Setup
from quire_lab.experiments.simulated import basis, side_by_side, simulated_settings
from quire_lab.simulate.devices import find_device

NUM_REQUESTS = 500
BASE: dict[str, Any] = {
    "model": "opt-6.7b",
    "device": "simulated:a100-40g",
    "enable_prefix_caching": False,
}

BOUND = (
    f"what bounds paging's gain: the same memory holds about {POSITIONS / (INPUT + 32):.1f} (32 out) to "
    f"{POSITIONS / (INPUT + 256):.1f} (256 out) times as many requests as where {POSITIONS:,} positions are reserved "
    "for each; prompts cost the same arithmetic either way, and every request of a larger batch reads its own K and V: "
    "most is gained where memory holds few requests and weights are most of what a step reads"
)


def run(setup: Setup) -> Finding:
    settings = simulated_settings(setup, BASE)
    num_requests = setup.pick(60, NUM_REQUESTS, NUM_REQUESTS)
    jobs = [Job(cell, settings, num_requests, setup.seed) for cell in cells(setup.size, settings)]
    with setup.progress(len(jobs), "runs") as bar:
        found = side_by_side(setup, measure, jobs, bar)
    return _finding(setup, settings, found, num_requests)


def _largest(found: list[Measured]) -> str:
    """What paging gave at most, and where, beside what was published."""
    most = gains(found, "unpaged")[0]
    others = ", ".join(
        f"{gain.ratio:.1f} × {words} ({gain.in_words})"
        for words, gain in (("over dynamic", _first(found, "dynamic")), ("over none", _first(found, "none")))
        if gain is not None
    )
    return f"At most it gives {most.ratio:.1f} × ({most.in_words}; published: up to 4 ×), and {others}."


def _first(found: list[Measured], over: str) -> Gain | None:
    return next(iter(gains(found, over)), None)


def _finding(setup: Setup, settings: Mapping[str, Any], found: list[Measured], num_requests: int) -> Finding:
    grid = {
        (one.cell.num_outputs, one.cell.rate, one.cell.batching): one
        for one in found
        if one.cell.part == "grid"
    }
    longest = max(outputs for outputs, _, _ in grid)
    at_once = {name: grid[longest, math.inf, name] for name in BATCHING}
    rates = {name: one.output_rate for name, one in at_once.items()}
    take_away = (
        f"{num_requests} requests of {INPUT} in, {longest} out, all at once: {rates['paged']:,.0f} tokens/s with "
        f"paging, {rates['unpaged']:,.0f} without, {rates['dynamic']:,.0f} in dynamic batches and "
        f"{rates['none']:,.0f} one by one: paging gives {rates['paged'] / rates['unpaged']:.1f} ×. {_largest(found)}"
    )
    ordered = (
        rates["none"] < rates["dynamic"] <= rates["unpaged"] * 1.02 and rates["unpaged"] < rates["paged"]
    )
    check = Check(
        "all at once: none < dynamic ≤ continuous without paging < with paging, in tokens per second",
        " < ".join(f"{rates[name]:,.0f}" for name in ("none", "dynamic", "unpaged", "paged")),
        ordered,
    )
    return Finding(
        take_away,
        tables(found, DEVICES),
        pictures(found, str(settings["model"])),
        {
            "runs": [one.as_dict() for one in found],
            "largest": [
                {"over": over, "ratio": gain.ratio, "where": gain.in_words}
                for over in BATCHING
                if (gain := _first(found, over)) is not None and over != "paged"
            ],
        },
        {"seed": setup.seed, "engine": dict(settings), "num_requests": num_requests, "input": INPUT},
        [check],
        [
            *basis(settings),
            "without paging: memory reserved to the model's 2,048 positions; dynamic: batches of 16 over it and a "
            "window of 50 ms; none: one request at a time",
            BOUND,
            *(f"{find_device(one).in_words}" for one in DEVICES),
            "several devices: weights, KV and products split evenly; two ring all-reduces per layer at the link's data "
            "sheet rate and 10 µs each, which is an assumption",
        ],
    )


EXPERIMENT = Experiment(
    "characterize",
    "Batching and paging over models, devices and loads",
    "When do continuous batching and paging pay, and when does it not matter?",
    run,
)
