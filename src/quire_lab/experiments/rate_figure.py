"""Tables and pictures of `rate`."""

from typing import Any

from quire.bench.figure import GREY, Picture, bar_style, line_style, plain_log
from quire_lab.experiments.experiment import Table
from quire_lab.experiments.rate_curves import FRACTIONS, Curve, ratio
from quire_lab.experiments.simulated import BATCH_SIZE

LABELS = {
    "paged": "continuous, paged",
    "oracle": "continuous, Oracle",
    "pow2": "continuous, Pow2",
    "max": "continuous, Max",
    "ft": "request-level, Max (ft)",
    "static": f"static batches of {BATCH_SIZE}, paged",
    "dynamic": f"dynamic batches of {BATCH_SIZE}, paged",
}
LOOKS = {"static": 5, "dynamic": 6}  # beside the reservations', whose looks they would share
# sustained rate of paging over another policy, published for OPT-13B: low, high, where
PUBLISHED = {
    ("sharegpt", "oracle"): (1.7, 2.7),
    ("sharegpt", "max"): (2.7, 8.0),
    ("sharegpt", "ft"): (1.0, 22.0),
    ("chatbot", "oracle"): (2.0, 2.0),
}
PUBLISHED_BEAMS = {1: 1.8, 2: 2.4, 4: 3.2, 6: 3.5}  # over Pow2, Alpaca; a width of 1 is plain decoding
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # requests per second
Curves = dict[str, Curve]  # by policy
Wide = dict[tuple[str, int], Curves]  # by method and width


def pictures(plain: dict[str, Curves], wide: Wide) -> list[Picture]:
    best = max(ratio(plain["sharegpt"], other) for other in plain["sharegpt"])
    return [
        Picture(
            "rate",
            "Normalised latency against request rate",
            f"Whoever holds more requests at once serves a higher rate: up to {best:.1f} × on ShareGPT lengths.",
            lambda figure: _draw_panels(figure, plain),
            width=11.0,
            height=4.6,
        ),
        Picture(
            "rate-beams",
            "What several sequences per request gain from paging",
            "Sustained rate of paging over Pow2 on Alpaca lengths: samples and beams share blocks.",
            lambda figure: _draw_wide(figure, plain, wide),
            width=7.0,
            height=3.8,
        ),
        Picture(
            "rate-beams-latency",
            "Normalised latency against request rate, by beam width",
            "Alpaca lengths: beams share most of their blocks, so paging keeps up with a higher rate at every width.",
            lambda figure: _draw_beams(figure, plain, wide),
            width=11.0,
            height=4.0,
        ),
    ]


def sustained_table(plain: dict[str, Curves]) -> Table:
    rows = []
    for name, curves in plain.items():
        for policy, one in curves.items():
            rows.append(
                [
                    name,
                    LABELS[policy],
                    f"{one.sustained:.2f}",
                    f"{one.at_once.mean_full:.1f}",
                    f"{1e3 * one.points[0].normalised:.0f}",
                    f"{curves['paged'].sustained / one.sustained:.2f}",
                ]
            )
    head = [
        "requests",
        "policy",
        "sustained, req/s",
        "running when full",
        f"latency at {FRACTIONS[0]:g} × that, ms/token",
        "paged sustains ×",
    ]
    return Table("Sustained request rates", head, rows, left=2)


def compared_table(plain: dict[str, Curves], wide: Wide) -> Table:
    rows = []
    for (name, over), (low, high) in PUBLISHED.items():
        published = f"{low:g}" if low == high else f"{low:g}–{high:g}" if low > 1 else f"up to {high:g}"
        rows.append([f"{name}: paged over {over}", f"{ratio(plain[name], over):.2f}", published])
    rows.append(
        ["alpaca: paged over pow2", f"{ratio(plain['alpaca'], 'pow2'):.2f}", f"{PUBLISHED_BEAMS[1]:g}"]
    )
    for (method, width), curves in wide.items():
        words = "beams" if method == "beam" else "samples"
        published = f"{PUBLISHED_BEAMS[width]:g}" if method == "beam" else "–"
        rows.append([f"alpaca, {width} {words}: paged over pow2", f"{ratio(curves, 'pow2'):.2f}", published])
    return Table("Sustained rate, simulated and published", ["ratio", "here", "published"], rows)


def _draw_beams(figure: Any, plain: dict[str, Curves], wide: Wide) -> None:
    beams = {width: curves for (method, width), curves in wide.items() if method == "beam"}
    policies = next(iter(beams.values()))
    alone = {policy: plain["alpaca"][policy] for policy in policies}
    panels = {"one sequence": alone} | {f"{width} beams": beams[width] for width in sorted(beams)}
    _draw_panels(figure, panels)


def _draw_panels(figure: Any, panels: dict[str, Curves]) -> None:
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (name, curves) in zip(axes, panels.items(), strict=True):
        for policy, one in curves.items():
            rates = [point.rate for point in one.points]
            style = line_style(LOOKS.get(policy, policy))
            if policy == "static":  # under heavy load dynamic batches are the same ones, and lie on it
                style = {**style, "linewidth": 5.0, "markersize": 11.0, "alpha": 0.6}
            axis.plot(rates, [point.normalised for point in one.points], label=LABELS[policy], **style)
            axis.axvline(one.sustained, color=style["color"], linewidth=0.7, alpha=0.6)
        axis.set(title=name, xlabel="requests per second", xscale="log")
        plain_log(axis, "y")
        shown = [one for one in TICKS if axis.get_xlim()[0] <= one <= axis.get_xlim()[1]]
        axis.set_xticks(shown, [f"{one:g}" for one in shown])
        axis.set_xticks([], minor=True)
    axes[0].set_ylabel("normalised latency, s per token")
    axes[0].plot([], [], color=GREY, linewidth=0.7, label="sustained at most")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)


def _draw_wide(figure: Any, plain: dict[str, Curves], wide: Wide) -> None:
    axis = figure.subplots()
    widths = sorted({width for _, width in wide})
    axis.bar(0, ratio(plain["alpaca"], "pow2"), 0.36, **bar_style(0))
    for place, (method, words) in enumerate((("parallel", "samples"), ("beam", "beams"))):
        values = [ratio(wide[method, width], "pow2") for width in widths]
        middle = [x + 1 + 0.38 * (place - 0.5) for x in range(len(widths))]
        axis.bar(middle, values, 0.36, label=words, **bar_style(place + 1))
    published = [PUBLISHED_BEAMS[1], *(PUBLISHED_BEAMS[width] for width in widths)]
    axis.hlines(
        published,
        [x - 0.42 for x in range(len(published))],
        [x + 0.42 for x in range(len(published))],
        color=GREY,
        linestyle="--",
        label="published, beams",
    )
    axis.set_xticks(range(len(widths) + 1), ["one sequence", *(f"{width} each" for width in widths)])
    axis.set(ylabel="paged over Pow2, ×")
    axis.grid(axis="x", visible=False)
    axis.legend(loc="upper left")
