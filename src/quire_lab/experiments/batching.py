"""`batching`: static, dynamic and continuous batches: who occupies which slot when, and what that costs under load."""

from typing import Any

from quire.bench.figure import Picture
from quire_lab.experiments.batching_load import (
    DEVICE,
    MEAN_ANSWER,
    MODEL,
    SLOTS_HERE,
    WINDOW_MS,
    WORKLOADS,
    Point,
    draw_load,
    points_here,
    simulated_points,
)
from quire_lab.experiments.batching_timeline import (
    ANSWERS,
    POLICIES,
    PROMPT_TOKENS,
    SLOTS,
    WINDOW,
    Drawn,
    draw_figure,
    draw_timelines,
)
from quire_lab.experiments.engines import in_words, opened
from quire_lab.experiments.experiment import Check, Experiment, Finding, Setup, Table

OFFLINE = float("inf")


def run(setup: Setup) -> Finding:
    rates = setup.pick(
        (16.0, OFFLINE),
        (2.0, 5.0, 10.0, 20.0, 40.0, 80.0, OFFLINE),
        (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 80.0, OFFLINE),
    )
    count, here, answer, rounds = setup.pick((16, 10, 6, 1), (300, 32, 20, 2), (1000, 96, 64, 5))
    slots = setup.pick(4, 64, 64)  # of the simulated device
    total = len(WORKLOADS) * len(POLICIES) * (len(rates) * count + rounds * here)
    with setup.progress(total, "req") as bar:
        bar.note("time lines")
        drawn = draw_timelines(setup)
        bar.note("all at once, here")
        offline = points_here(setup, here, answer, rounds, bar)
        bar.note(f"{MODEL} on {DEVICE}")
        points = simulated_points(setup, rates, count, slots, bar)
    with opened(setup, max_num_seqs=SLOTS) as bench:
        words = in_words(bench)
    return _finding(setup, drawn, offline, points, words, (here, answer, count, slots))


def _finding(
    setup: Setup,
    drawn: list[Drawn],
    offline: list[Point],
    points: list[Point],
    words: str,
    sizes: tuple[int, int, int, int],
) -> Finding:
    here, answer, count, slots = sizes
    gain = {name: _gain(points, name) for name in WORKLOADS}
    gain_here = {name: _gain(offline, name) for name in WORKLOADS}
    take_away = (
        f"Where all answers have the same length, static batches lose little (continuous is {gain['uniform']:.2f} "
        f"times as fast offline); with varied lengths continuous batching gives {gain['varied']:.2f} times the "
        f"tokens, because a slot is free as soon as its answer ends. On this machine: {gain_here['uniform']:.2f} and "
        f"{gain_here['varied']:.2f} times."
    )
    return Finding(
        take_away,
        [
            _drawn_table(drawn),
            _load_table("All requests at once, on this machine", offline),
            _load_table(f"{MODEL} on {DEVICE}", points),
        ],
        _pictures(drawn, points, gain),
        {
            "timelines": [_timeline(one) for one in drawn],
            "here": list(map(_record, offline)),
            "simulated": list(map(_record, points)),
        },
        {
            "seed": setup.seed,
            "model": words,
            "slots": SLOTS,
            "answers": ANSWERS,
            "window_steps": WINDOW,
            "simulated": {
                "model": MODEL,
                "device": DEVICE,
                "slots": slots,
                "num_requests": count,
                "window_ms": WINDOW_MS,
            },
        },
        _checks(drawn, gain, gain_here),
        (
            f"time lines: {words}, prompts of {PROMPT_TOKENS} tokens, answers of {', '.join(map(str, ANSWERS))}; three "
            f"requests are there at once, others follow one by one; dynamic batches wait {WINDOW} steps to be full",
            f"on this machine: {here} requests, 16 tokens in, {answer} out on average, {SLOTS_HERE} slots",
            f"simulated: scheduler and memory are real, a step's time comes from a cost model of the H200; {count} "
            f"requests, {MEAN_ANSWER} tokens in and on average out, {slots} slots, Poisson arrivals, window "
            f"{WINDOW_MS:.0f} ms",
            "static: a batch starts with whoever waits and ends with its longest answer; rows that ended keep their "
            "slot and their computation until then",
        ),
    )


def _pictures(drawn: list[Drawn], points: list[Point], gain: dict[str, float]) -> list[Picture]:
    by_policy = {one.policy: one for one in drawn}
    return [
        Picture(
            "batching",
            f"Who occupies which slot when: {len(ANSWERS)} requests, {SLOTS} slots",
            f"Continuous batching uses {100 * by_policy['continuous'].busy_share:.0f} % of the slots' time, "
            f"static {100 * by_policy['static'].busy_share:.0f} %: there a slot waits for the longest of its batch.",
            lambda figure: draw_figure(figure, drawn),
            height=5.8,
        ),
        Picture(
            "batching-load",
            f"Load on three batching policies: {MODEL} on a simulated H200",
            f"With varied answers continuous batching carries {gain['varied']:.1f} times the load of static, "
            f"with uniform ones {gain['uniform']:.1f} times, and latency stays low up to it.",
            lambda figure: draw_load(figure, points),
            height=5.6,
        ),
    ]


def _checks(drawn: list[Drawn], gain: dict[str, float], gain_here: dict[str, float]) -> list[Check]:
    by_policy = {one.policy: one for one in drawn}
    return [
        Check(
            "offline, static batches do well on uniform lengths: within 25 % of continuous",
            f"continuous is {gain['uniform']:.2f} times as fast (here: {gain_here['uniform']:.2f})",
            gain["uniform"] < 1.25,
        ),
        Check(
            "varied lengths need continuous batching: at least 1.5 times the throughput of static",
            f"{gain['varied']:.2f} times (here: {gain_here['varied']:.2f})",
            gain["varied"] >= 1.5,
        ),
        Check(
            "continuous batching never computes for an answer that is over",
            f"{100 * by_policy['continuous'].ended_share:.1f} % of slot time, static "
            f"{100 * by_policy['static'].ended_share:.1f} %",
            by_policy["continuous"].ended_share == 0.0,
        ),
    ]


def _gain(points: list[Point], workload: str) -> float:
    """Continuous over static in tokens a second, all requests at once."""
    rate = {
        one.policy: one.tokens_per_second
        for one in points
        if one.workload == workload and one.rate == OFFLINE
    }
    return rate["continuous"] / rate["static"]


def _drawn_table(drawn: list[Drawn]) -> Table:
    rows = [
        [
            one.policy,
            f"{1e3 * one.seconds:.0f}",
            f"{1e3 * one.mean_latency:.0f}",
            f"{100 * one.busy_share:.0f}",
            f"{100 * one.ended_share:.0f}",
            str(len(one.moments)),
        ]
        for one in drawn
    ]
    head = [
        "policy",
        "all done, ms",
        "mean latency, ms",
        "slot time used, %",
        "for ended answers, %",
        "steps",
    ]
    return Table("The small workload", head, rows)


def _load_table(title: str, points: list[Point]) -> Table:
    rows = [
        [
            one.workload,
            one.policy,
            "all at once" if one.rate == OFFLINE else f"{one.rate:g}",
            f"{one.tokens_per_second:,.0f}",
            f"{1e3 * one.normalised_latency:.1f}",
            f"{one.mean_latency:.2f}",
        ]
        for one in points
    ]
    head = ["lengths", "policy", "requests/s", "tokens/s", "ms per token", "mean latency, s"]
    return Table(title, head, rows, left=2)


def _timeline(one: Drawn) -> dict[str, Any]:
    return {
        "policy": one.policy,
        "seconds": one.seconds,
        "mean_latency_seconds": one.mean_latency,
        "busy_share": one.busy_share,
        "ended_share": one.ended_share,
        "steps": [
            {
                "begins": moment.begins,
                "ends": moment.ends,
                "rows": [(row.row, row.request_id, row.kind) for row in moment.rows],
            }
            for moment in one.moments
        ],
    }


def _record(one: Point) -> dict[str, Any]:
    return {
        "workload": one.workload,
        "policy": one.policy,
        "requests_per_second": None if one.rate == OFFLINE else one.rate,
        "tokens_per_second": one.tokens_per_second,
        "normalised_latency_seconds": one.normalised_latency,
        "mean_latency_seconds": one.mean_latency,
    }


EXPERIMENT = Experiment(
    "batching",
    "Static, dynamic and continuous batches",
    "Requests arrive when they like and end when they like. Who shares a batch with whom, and for how long?",
    run,
)
