"""`waste`: what KV memory is spent on: tokens, reserved, fragments, under paging and three reservations."""

from typing import Any

from quire.bench.figure import LIGHT, LOOKS, Picture
from quire_lab.experiments.data import Drawn
from quire_lab.experiments.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.experiments.waste_run import CONTEXT, KINDS, POOL_TOKENS, WAYS, Spent, spend
from quire_lab.experiments.waste_tables import BLOCK_SIZE, TEXTS, draw_tables, table_stages

NAMES = ("sharegpt", "alpaca")
OTHER_SIZES = (1, 8, 32, 128)  # of paging's blocks, on the first workload
# share of memory that holds tokens, in per cent: Figure 2 of the PagedAttention paper
PUBLISHED = {"max": 20.4, "pow2": 26.8, "oracle": 38.2, "paged": 96.3}
WORDS = {
    "tokens": "tokens",
    "reserved": "reserved for later",
    "internal": "never written (internal)",
    "external": "too small a gap (external)",
    "free": "free",
}
COLORS = {
    "tokens": LOOKS[0].color,
    "reserved": LOOKS[5].color,
    "internal": LOOKS[1].color,
    "external": LOOKS[3].color,
    "free": LIGHT,
}
HATCHES = {"tokens": "", "reserved": "...", "internal": "///", "external": "xxx", "free": ""}


def run(setup: Setup) -> Finding:
    count = setup.pick(20, 240, 2000)
    counts = {
        "sharegpt": count,
        "alpaca": 3 * count,
    }  # Alpaca's are short: more of them fill the pool
    drawn = {name: setup.data.lengths(name, counts[name], setup.seed) for name in NAMES}
    pool = setup.pick(CONTEXT + 512, POOL_TOKENS, POOL_TOKENS)
    spent: list[Spent] = []
    with setup.progress(sum(counts.values()) * len(WAYS) + count * len(OTHER_SIZES), "req") as bar:
        for name, one in drawn.items():
            for way in WAYS:
                bar.note(f"{name}, {way}")
                spent.append(spend(name, one.lengths, way, on_finish=bar, pool_tokens=pool))
        sizes = []
        for size in OTHER_SIZES:
            bar.note(f"blocks of {size}")
            sizes.append(spend(NAMES[0], drawn[NAMES[0]].lengths, "paged", size, bar, pool))
    return _finding(setup, drawn, spent, sizes, pool)


def _finding(
    setup: Setup, drawn: dict[str, Drawn], spent: list[Spent], sizes: list[Spent], pool: int
) -> Finding:
    found = {(one.workload, one.way): one for one in spent}
    paged, largest = found["sharegpt", "paged"], found["sharegpt", "max"]
    take_away = (
        f"Paging wastes {100 * paged.held_waste:.1f} % of the memory it holds (ShareGPT lengths, blocks of 16) and "
        f"keeps {paged.mean_running:.0f} requests running; reserving the maximum uses {_percent(largest, 'tokens')} % "
        f"of the pool for tokens and runs {largest.mean_running:.0f}."
    )
    stages = table_stages()
    pictures = [
        Picture(
            "waste",
            "What KV memory is spent on",
            f"While requests wait, paging fills {_percent(paged, 'tokens')} % of the pool with tokens, the three "
            f"reservations {_percent(largest, 'tokens')} to {_percent(found['sharegpt', 'oracle'], 'tokens')} %.",
            lambda figure: _draw_shares(figure, found),
            height=4.4,
        ),
        Picture(
            "waste-time",
            f"KV memory over time: ShareGPT lengths, {pool:,} tokens of pool",
            "Reservations hold memory long before it is written, or for nothing; paging takes a block at a time.",
            lambda figure: _draw_time(figure, found),
            height=5.2,
        ),
        Picture(
            "waste-tables",
            f"Block tables of two requests, block size {BLOCK_SIZE}",
            "Logical blocks are in order; physical ones lie anywhere. Only a request's last block has room to spare.",
            lambda figure: draw_tables(figure, stages),
            width=9.6,
            height=7.4,
        ),
    ]  # fmt: skip
    return Finding(
        take_away,
        [_table(spent), _size_table([*sizes, paged])],
        pictures,
        {
            "spent": list(map(_record, spent)),
            "paging_by_block_size": list(map(_record, sizes)),
            "block_tables": [
                {
                    "stage": stage.title,
                    "tables": {
                        name: [(entry.physical, entry.filled) for entry in entries]
                        for name, entries in stage.tables.items()
                    },
                }
                for stage in stages
            ],
        },
        {
            "seed": setup.seed,
            "pool_tokens": pool,
            "context": CONTEXT,
            "num_requests": {name: len(one.lengths) for name, one in drawn.items()},
        },
        _checks(found, sizes),
        (
            *(one.source for one in drawn.values()),
            f"scheduler and memory are the engine's own, no model; all requests at once, {pool:,} tokens of "
            "pool; shares are means over the steps in which a request waited",
            "waste of paging: positions in blocks that hold no token, over all positions that are held",
            "max reserves the context of 2,048 tokens, pow2 the answer rounded up to a power of two, oracle exactly "
            "what will be written; each in one piece, first fit",
            "published: “Efficient Memory Management for Large Language Model Serving with PagedAttention”, Figure 2, "
            "whose server was loaded differently: orders compare, not numbers",
            f"block tables: “{TEXTS['A'][0]} …”, words as tokens, from a run of scheduler and paged memory",
        ),
    )


def _percent(one: Spent, kind: str) -> str:
    return f"{100 * one.shares[kind]:.0f}"


def _checks(found: dict[tuple[str, str], Spent], sizes: list[Spent]) -> list[Check]:
    paged = found["sharegpt", "paged"]
    all_paged = [*(found[name, "paged"] for name in NAMES), *sizes]
    slack = ", ".join(f"{one.max_slack} of {one.block_size}" for one in all_paged)
    tokens = [found["sharegpt", way].shares["tokens"] for way in ("max", "pow2", "oracle", "paged")]
    return [
        Check(
            "paging wastes less than 4 % at block size 16 on ShareGPT lengths",
            f"{100 * paged.held_waste:.2f} %",
            paged.held_waste < 0.04,
        ),
        Check(
            "a sequence never wastes a whole block, on any lengths and block sizes",
            f"at most {slack}",
            all(one.max_slack < one.block_size for one in all_paged),
        ),
        Check(
            "paging has no external fragmentation",
            f"{max(one.shares['external'] for one in all_paged):g}",
            all(one.shares["external"] == 0 for one in all_paged),
        ),
        Check(
            "reserving the maximum uses less than 40 % of memory",
            f"{100 * found['sharegpt', 'max'].shares['tokens']:.1f} %",
            found["sharegpt", "max"].shares["tokens"] < 0.4,
        ),
        Check(
            "tokens' share: max < pow2 < oracle < paged",
            " < ".join(f"{100 * one:.0f}" for one in tokens) + " %",
            tokens == sorted(tokens),
        ),
    ]


def _table(spent: list[Spent]) -> Table:
    rows = [
        [
            one.workload,
            one.way,
            *(f"{100 * one.shares[kind]:.1f}" for kind in KINDS),
            f"{100 * one.held_waste:.1f}",
            f"{one.mean_running:.1f}",
            f"{PUBLISHED[one.way]:.1f}",
        ]
        for one in spent
    ]
    head = [
        "lengths",
        "memory",
        *(f"{kind}, %" for kind in KINDS),
        "waste of held, %",
        "running",
        "published tokens, %",
    ]
    return Table("Shares of the pool while requests wait", head, rows, left=2)


def _size_table(sizes: list[Spent]) -> Table:
    rows = [
        [
            str(one.block_size),
            f"{100 * one.held_waste:.2f}",
            f"{one.max_slack}",
            f"{one.mean_running:.1f}",
        ]
        for one in sorted(sizes, key=lambda one: one.block_size)
    ]
    head = ["block size", "waste of held memory, %", "most in one sequence, tokens", "running"]
    return Table("Paging by block size, ShareGPT lengths", head, rows, left=0)


def _draw_shares(figure: Any, found: dict[tuple[str, str], Spent]) -> None:
    from matplotlib.patches import Patch

    axes = figure.subplots(1, len(NAMES), sharey=True)
    for axis, name in zip(axes, NAMES, strict=True):
        for place, way in enumerate(WAYS):
            one, left = found[name, way], 0.0
            for kind in KINDS:
                width = 100 * one.shares[kind]
                axis.barh(
                    place,
                    width,
                    0.7,
                    left=left,
                    color=COLORS[kind],
                    hatch=HATCHES[kind],
                    edgecolor="white",
                    linewidth=0.5,
                )
                if width >= 7:
                    axis.text(
                        left + width / 2, place, f"{width:.0f}", ha="center", va="center", fontsize=8,
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85},
                    )  # fmt: skip
                left += width
        axis.set_yticks(range(len(WAYS)), WAYS)
        axis.set_ylim(len(WAYS) - 0.5, -0.5)
        axis.grid(axis="y", visible=False)
        axis.set(title=f"{name} lengths", xlabel="% of the pool, while requests wait", xlim=(0, 100))
    figure.legend(
        handles=[
            Patch(facecolor=COLORS[kind], hatch=HATCHES[kind], edgecolor="white", label=WORDS[kind])
            for kind in KINDS
        ],
        loc="outside lower center",
        ncols=len(KINDS),
    )


def _draw_time(figure: Any, found: dict[tuple[str, str], Spent]) -> None:
    from matplotlib.patches import Patch

    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    for axis, way in zip([*axes[0], *axes[1]], WAYS, strict=True):
        samples = found["sharegpt", way].samples
        stride = max(1, len(samples) // 400)
        samples = samples[::stride]
        steps = [sample.moment for sample in samples]
        parts = [
            [100 * getattr(sample.spending, kind) / sample.spending.total for sample in samples]
            for kind in KINDS
        ]
        axis.stackplot(steps, *parts, colors=[COLORS[kind] for kind in KINDS], linewidth=0)
        axis.set(title=f"{way}: requests wait until step {steps[-1]:,.0f}" if steps else way, ylim=(0, 100))
        axis.set_xlim(left=0)
        axis.grid(visible=False)
    for axis in axes[1]:
        axis.set_xlabel("step")
    for row in axes:
        row[0].set_ylabel("% of the pool")
    figure.legend(
        handles=[Patch(facecolor=COLORS[kind], label=WORDS[kind]) for kind in KINDS],
        loc="outside lower center",
        ncols=len(KINDS),
    )


def _record(one: Spent) -> dict[str, Any]:
    return {
        "workload": one.workload,
        "memory": one.way,
        "block_size": one.block_size,
        "shares_of_pool": one.shares,
        "waste_of_held": one.held_waste,
        "mean_running": one.mean_running,
        "max_unwritten_positions_of_a_sequence": one.max_slack,
        "num_requests": one.num_requests,
    }


EXPERIMENT = Experiment(
    "waste",
    "What KV memory is spent on",
    "Nobody knows how long an answer will be. What does reserving for the longest cost, and what if memory is paged?",
    run,
)
