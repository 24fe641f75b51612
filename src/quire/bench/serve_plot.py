"""A picture of what `bench serve` found: latency against rate for a sweep, distributions for one rate."""

from collections.abc import Sequence
from typing import Any

from quire.bench.figure import plain_log
from quire.bench.serve import Round, Served
from quire.core.errors import ConfigError


def check_plotting(path: str) -> None:
    """Before anything is measured: a picture that cannot be drawn is known at once."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(f"--plot {path} needs matplotlib: pip install 'quire[bench]'") from None
    matplotlib.use("agg")  # files only: no display is needed


def plot_serve(served: Served, rounds: Sequence[dict[str, Any]], path: str) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    if len(rounds) > 1:
        _sweep(left, right, rounds)
    else:
        _distributions(left, right, served.rounds[0])
    figure.suptitle(f"{served.model or 'server'}: {served.workload.source}")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: cannot be written ({error})") from error
    finally:
        pyplot.close(figure)


def _sweep(left: Any, right: Any, rounds: Sequence[dict[str, Any]]) -> None:
    """Against the rate that was reached: that an overloaded server falls behind the asked one is the point."""
    drawn = sorted((one for one in rounds if one["ttft_ms"]), key=lambda one: one["requests_per_second"])
    reached = [one["requests_per_second"] for one in drawn]
    for axis, keys in ((left, ("normalised_ms", "tpot_ms")), (right, ("ttft_ms", "e2e_ms"))):
        for key in keys:
            axis.plot(reached, [one[key].get("mean") for one in drawn], marker="o", label=f"{key[:-3]}, mean")
        axis.set(xlabel="requests per second, answered", ylabel="ms")
        plain_log(axis, "y")
        axis.legend()


def _distributions(left: Any, right: Any, one: Round) -> None:
    complete = [outcome for outcome in one.outcomes if outcome.error is None]
    series = (
        (left, [o.to_first for o in complete], "time to first token"),
        (right, [gap for o in complete for gap in o.gaps], "between tokens"),
    )
    for axis, seconds, name in series:
        axis.ecdf([1e3 * value for value in seconds] or [0.0])
        axis.set(xlabel=f"{name}, ms", ylabel="share of all")
