"""`kvcache`: the same tokens with a KV cache and without one, where every token computes all before it again."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from quire.bench.drive import Bench
from quire.bench.workload import Lengths
from quire.core.request import Request
from quire_lab.measure.compare import PLANNED_PAIRS, Interleaved, interleave
from quire_lab.measure.engines import greedy, in_words, opened, prompt_rate, warm_up
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import GREY, Picture, line_style, look, plain_log
from quire_lab.report.interval import CONFIDENCE_WORDS, MIN_PAIRS, Interval
from quire_lab.report.regression import Power, fit_power

PROMPT = 2  # tokens: short, so that length is what was generated


@dataclass(frozen=True, slots=True)
class Generated:
    token_ids: list[int]
    seconds: list[float]  # each token's
    computed: list[int]  # tokens that the model had computed when each was there

    @property
    def until(self) -> list[float]:
        """Seconds until each token was there."""
        return list(accumulate(self.seconds))

    @property
    def total(self) -> float:
        return sum(self.seconds)


Pairs = Interleaved[str, Generated]  # "on" and "off"


def run(setup: Setup) -> Finding:
    with opened(setup, enable_prefix_caching=False, steps_in_flight=0) as bench:
        warm_up(bench)
        length = _length(setup, bench)
        prompt = bench.requests([Lengths(PROMPT, 1)])[0].prompt_token_ids
        variants = {
            "on": partial(_with_cache, bench, prompt, length),
            "off": partial(_without_cache, bench, prompt, length),
        }
        pairs = interleave(setup, variants, lambda run: run.total, "the cache")
        words = in_words(bench)
    return _finding(setup, pairs, length, words)


def _median(repeats: Sequence[Generated]) -> Generated:
    """Each token's time is the median of its repetitions."""
    seconds = [statistics.median(times) for times in zip(*(run.seconds for run in repeats), strict=True)]
    return Generated(repeats[0].token_ids, seconds, repeats[0].computed)


def _length(setup: Setup, bench: Bench) -> int:
    """Tokens for which computing all prefixes, half the length's square, takes its share of the time."""
    report = bench.built.report
    longest = min(report.limits.max_model_len, report.pool.num_tokens) - PROMPT - 1
    half_square = setup.seconds / PLANNED_PAIRS * prompt_rate(bench)
    fits = int((2 * half_square) ** 0.5) // 32 * 32
    return min(max(32, fits), longest, setup.pick(48, 1024, 4096))


def _with_cache(bench: Bench, prompt: list[int], length: int) -> Generated:
    engine, generated = bench.engine, Generated([], [], [])
    engine.add(Request(f"cached-{time.monotonic_ns()}", prompt, greedy(length)))
    last, before = time.perf_counter(), engine.stats.num_computed_tokens
    while engine.has_work:
        for update in engine.step():
            now = time.perf_counter()
            generated.token_ids.extend(update.token_ids)
            generated.seconds.append(now - last)
            generated.computed.append(engine.stats.num_computed_tokens - before)
            last = now
    return generated


def _without_cache(bench: Bench, prompt: list[int], length: int) -> Generated:
    """Each token is a request of its own, whose prompt is all that there is so far."""
    engine, generated = bench.engine, Generated([], [], [])
    before = engine.stats.num_computed_tokens
    for index in range(length):
        started = time.perf_counter()
        engine.add(Request(f"bare-{index}-{time.monotonic_ns()}", prompt + generated.token_ids, greedy(1)))
        while engine.has_work:
            for update in engine.step():
                generated.token_ids.extend(update.token_ids)
        generated.seconds.append(time.perf_counter() - started)
        generated.computed.append(engine.stats.num_computed_tokens - before)
    return generated


def _fit(values: Sequence[float]) -> Power:
    """Over the last three quarters: the curve's beginning is the prompt's and the first steps' doing."""
    first = len(values) // 4
    return fit_power(list(range(first + 1, len(values) + 1)), values[first:])


def _exponents(pairs: Pairs) -> tuple[Interval, Interval, Interval]:
    """Of time against length with a cache, without one, and what the second has more, each of every round."""
    on, off = ([_fit(run.until).exponent for run in pairs.runs[name]] for name in ("on", "off"))
    more = [without - cached for cached, without in zip(on, off, strict=True)]
    return Interval.of(on), Interval.of(off), Interval.of(more)


def _finding(setup: Setup, pairs: Pairs, length: int, words: str) -> Finding:
    on, off = _median(pairs.runs["on"]), _median(pairs.runs["off"])
    fits = {name: _fit(generated.until) for name, generated in (("on", on), ("off", off))}
    work = {name: _fit(generated.computed) for name, generated in (("on", on), ("off", off))}
    power_on, power_off, more = _exponents(pairs)
    same = all(run.token_ids == on.token_ids for runs in pairs.runs.values() for run in runs)
    totals = {name: pairs.interval(name, lambda run: run.total) for name in ("on", "off")}
    ratio = pairs.ratio("off", "on", lambda run: run.total)
    take_away = (
        f"{length} tokens take {totals['on'].text()} s with a KV cache and {totals['off'].text()} s without: "
        f"{ratio.claim('times as long')}. Work grows as length to the {work['on'].exponent:.2f} with a cache and to "
        f"the {work['off'].exponent:.2f} without, time to the {power_on.text()} and {power_off.text()}."
    )
    picture = Picture(
        "kvcache",
        "Generating with and without a KV cache",
        f"Without it {length} tokens compute {off.computed[-1] / on.computed[-1]:.0f} times as many; time: "
        f"{ratio.short('times as long')}.",
        lambda figure: _draw(figure, pairs, fits, work),
        height=3.9,
    )
    return Finding(
        take_away,
        [_table(on, off, length)],
        [picture],
        {
            "length": length,
            "ratio": ratio.record(),
            "total_seconds_with_cache": totals["on"].record(),
            "total_seconds_without_cache": totals["off"].record(),
            "time_exponents": {"on": power_on.record(), "off": power_off.record(), "more": more.record()},
            "same_tokens": same,
            "work_fits": {name: asdict(fit) for name, fit in work.items()},
            "tokens_computed_with_cache": on.computed[-1],
            "tokens_computed_without_cache": off.computed[-1],
            "fits": {name: asdict(fit) for name, fit in fits.items()},
            "seconds_with_cache": on.seconds,
            "seconds_without_cache": off.seconds,
        },
        {"seed": setup.seed, "prompt_tokens": PROMPT, "num_tokens": length, "model": words},
        [
            Check("both ways give the same tokens", "the same" if same else "different", same),
            Check(
                "without a cache time grows by a higher power of the length (by 0.2 at least)",
                f"{power_off.text()} against {power_on.text()}, higher by {more.text()}",
                more.is_above(0.2),
            ),
            Check(
                "tokens computed grow as the square of the length without a cache, and as the length with one",
                f"{work['off'].exponent:.2f} and {work['on'].exponent:.2f}",
                work["off"].exponent > 1.7 and work["on"].exponent < 1.05,
            ),
        ],
        (
            f"{words}; one sequence, greedy, {PROMPT} prompt tokens; both ways in turns, {pairs.num_rounds} rounds; "
            f"times are medians with {CONFIDENCE_WORDS} intervals",
            "without: every token is a fresh request whose prompt is all that was generated so far",
            "exponents: least squares in the logarithms over the last three quarters of the length (R² "
            f"{fits['on'].r_squared:.3f} and {fits['off'].r_squared:.3f}); with long prefixes the power without a "
            "cache goes towards 2 and, once attention counts, beyond",
        ),
    )


def _table(on: Generated, off: Generated, length: int) -> Table:
    shown = sorted({n for n in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if n < length} | {length})
    rows = [
        [
            f"{n:,}",
            f"{on.until[n - 1]:.3f}",
            f"{off.until[n - 1]:.3f}",
            f"{off.until[n - 1] / on.until[n - 1]:.1f}",
            f"{on.computed[n - 1]:,}",
            f"{off.computed[n - 1]:,}",
            f"{1e3 * _near(on.seconds, n):.1f}",
            f"{1e3 * _near(off.seconds, n):.1f}",
        ]
        for n in shown
    ]
    head = [
        "tokens",
        "cache on, s",
        "off, s",
        "ratio",
        "computed, on",
        "computed, off",
        "each, on, ms",
        "each, off, ms",
    ]
    return Table(
        "Time until a number of tokens was generated, and how many were computed for them", head, rows, left=0
    )


def _near(seconds: list[float], place: int) -> float:
    """The median around the place: one step may be disturbed."""
    return statistics.median(seconds[max(0, place - 4) : place + 3])


def _draw(figure: Any, pairs: Pairs, fits: dict[str, Power], work: dict[str, Power]) -> None:
    left, middle, right = figure.subplots(1, 3)
    for series, (key, words) in enumerate((("on", "cache on"), ("off", "cache off"))):
        generated = _median(pairs.runs[key])
        lengths = list(range(1, len(generated.seconds) + 1))
        style = {**line_style(series), "markevery": max(1, len(lengths) // 8)}
        if pairs.num_rounds >= MIN_PAIRS:
            untils = [
                Interval.of(times) for times in zip(*(run.until for run in pairs.runs[key]), strict=True)
            ]
            band = [i.low for i in untils], [i.high for i in untils]
            left.fill_between(lengths, *band, color=look(series).color, alpha=0.25, linewidth=0)
        left.plot(lengths, generated.until, label=f"{words}: power {fits[key].exponent:.2f}", **style)
        fitted = lengths[len(lengths) // 4 :]
        left.plot(fitted, [fits[key].at(n) for n in fitted], color=GREY, linewidth=0.9, linestyle=":")
        middle.plot(lengths, [1e3 * _near(generated.seconds, n) for n in lengths], label=words, **style)
        right.plot(lengths, generated.computed, label=f"{words}: power {work[key].exponent:.2f}", **style)
    left.plot([], [], color=GREY, linewidth=0.9, linestyle=":", label="fitted power")
    left.set(title="time for a number of tokens", xlabel="tokens generated", ylabel="seconds")
    middle.set(title="time of each token", xlabel="tokens generated before it", ylabel="milliseconds")
    right.set(title="work", xlabel="tokens generated", ylabel="tokens computed")
    middle.set_ylim(bottom=0)
    for axis in (left, right):
        plain_log(axis, "x")
        plain_log(axis, "y")
    for axis in (left, middle, right):
        axis.legend(loc="upper left", fontsize=7)


EXPERIMENT = Experiment(
    "kvcache",
    "What a KV cache is for",
    "Attention looks back at the keys and values of all tokens so far. What if they were not kept?",
    run,
)
