"""`waste`: what KV memory is spent on: tokens, reserved, fragments, under paging and three reservations."""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

from quire.bench.drive import BenchRequest
from quire.bench.workload import Lengths, within
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.request import Request, Sequence, ints
from quire.core.step import Step, StepResult
from quire.engine.build.resolve import resolve_memory
from quire.engine.engine import Engine
from quire.engine.policies import make_memory
from quire.engine.validation import Limits
from quire.memory.paged import PagedMemory
from quire.sampling.records import TokenMask
from quire_lab.baselines.memory_usage import MemoryUsageSample, MemoryUsageSampler
from quire_lab.measure.counting_runner import CountingRunner
from quire_lab.measure.engines import greedy, submit
from quire_lab.measure.sharing import SHARES
from quire_lab.report.data import SampledLengths
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import GREY, LIGHT, LOOKS, Picture, look

# What memory is spent on while requests of given lengths go through scheduler and memory, without a model.

POOL_TOKENS = 15_700  # what OPT-13B has on a GPU of 40 GB: the setting of the published numbers
CONTEXT = 2048
ROWS = 512
EVERY = 3  # steps: looking costs more than a step without a model
VOCABULARY = 50_000
WAYS = ("paged", "oracle", "pow2", "max")
KINDS = ("tokens", "reserved", "internal", "external", "free")  # of Spending; nothing here keeps ended rows


@dataclass(frozen=True, slots=True)
class Spent:
    """Of one way to allocate memory, over the steps in which requests waited, if any did: there memory is the limit."""

    workload: str
    way: str
    block_size: int
    shares: dict[str, float]  # of the whole pool, by KINDS
    samples: Several[MemoryUsageSample]  # moments are steps
    mean_running: float
    max_slack: int  # positions in blocks that a sequence had not written, at most
    num_requests: int

    @property
    def held_waste(self) -> float:
        """Of the memory that is held: what holds no token."""
        held = sum(self.shares[kind] for kind in ("tokens", "reserved", "internal"))
        return 1.0 - self.shares["tokens"] / held if held else 0.0


def spend(
    workload: str,
    lengths: Several[Lengths],
    way: str,
    block_size: int = 16,
    on_finish: Callable[[], None] = lambda: None,
    pool_tokens: int = POOL_TOKENS,
) -> Spent:
    """All requests at once, as many of them together as memory allows."""
    held, _ = within(lengths, min(CONTEXT, pool_tokens))
    config = resolve_memory(
        MemoryConfig(
            block_size=block_size if way == "paged" else 1, reservation=way, enable_prefix_caching=False
        )
    )
    memory = make_memory(config, pool_tokens // config.block_size, CONTEXT)
    scheduler = SchedulerConfig(ROWS, 8192, steps_in_flight=0)
    runner = CountingRunner(VOCABULARY, SHARES, 0)
    engine = Engine(scheduler, Limits(VOCABULARY, CONTEXT, ROWS, ()), memory, runner)
    requests = [
        BenchRequest([2] * sequence.num_prompt_tokens, greedy(sequence.num_output_tokens))
        for sequence in held
    ]
    submit(engine, requests, way)
    sampler, before = MemoryUsageSampler(memory), MemoryUsageSampler(memory)
    running: list[int] = []
    slack = 0
    while engine.has_work:
        for update in engine.step():
            if update.finish_reason is not None:
                on_finish()
        if engine.stats.num_steps % EVERY:
            continue
        if isinstance(memory, PagedMemory):
            slack = max((slack, *(_slack(memory, group) for group in engine.scheduler.running)))
        first = engine.scheduler.waiting.peek()
        if first is not None:
            running.append(len(engine.scheduler.running))
            sampler.sample(float(engine.stats.num_steps), engine.scheduler.running, (), first.request)
        elif not running:
            before.sample(float(engine.stats.num_steps), engine.scheduler.running)
    engine.check_integrity()
    sampler = sampler if running else before  # no request ever waited: then all steps count
    shares = sampler.mean_shares() or dict.fromkeys((*KINDS, "ended"), 0.0)
    return Spent(
        workload,
        way,
        config.block_size,
        shares,
        sampler.samples(),
        sum(running) / max(1, len(running)),
        slack,
        len(held),
    )


def _slack(memory: PagedMemory, sequence: Sequence) -> int:
    return len(sequence.block_ids) * memory.block_size - sequence.num_computed


# Block tables of a small example, as lectures draw them: logical blocks, the table, physical blocks.

BLOCK_SIZE, NUM_BLOCKS = 4, 8
TEXTS = {
    "A": ("Alan Turing is a computer scientist", "and mathematician renowned for"),
    "B": ("Artificial intelligence is the", "future of technology and"),
}
STAGES = (0, 3)  # tokens of the answers that are stored when it is drawn: after the prompts, and later


@dataclass(frozen=True, slots=True)
class TableEntry:
    physical: int
    filled: int


@dataclass(frozen=True, slots=True)
class Stage:
    """What memory held at one moment, by request."""

    title: str
    words: dict[str, list[str]]  # that are stored
    tables: dict[str, list[TableEntry]]


class _SpeakingRunner:
    """Answers with the words that are written down: tokens are words here."""

    def __init__(self, lines: dict[int, list[int]]) -> None:
        self._lines = lines  # by a prompt's first token: prompt and answer
        self._rows: dict[int, list[int]] = {}
        self._launched: deque[StepResult] = deque()

    def launch(self, step: Step) -> None:
        for start in step.starts:
            self._rows[start.row] = self._lines.get(start.token_ids[0], [])
        tokens = []
        for source, row in zip(step.sample_sources, step.sample_rows, strict=True):
            place, line = step.num_computed[source] + step.num_tokens[source], self._rows[row]
            tokens.append(line[place] if place < len(line) else 0)
        self._launched.append(StepResult(step.step_id, ints(tokens)))

    def mask(self, mask: TokenMask) -> None:
        raise NotImplementedError("nothing here has a grammar")

    def collect(self) -> StepResult:
        return self._launched.popleft()

    def close(self) -> None:
        self._launched.clear()


def table_stages() -> list[Stage]:
    """From a run of scheduler and PagedMemory; blocks were used before, so that they come in no order."""
    vocabulary = sorted({word for prompt, answer in TEXTS.values() for word in f"{prompt} {answer}".split()})
    ids = {word: index + 1 for index, word in enumerate(vocabulary)}
    lines = {
        name: [ids[word] for word in f"{prompt} {answer}".split()] for name, (prompt, answer) in TEXTS.items()
    }
    memory = PagedMemory(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    runner = _SpeakingRunner({line[0]: line for line in lines.values()})
    engine = Engine(
        SchedulerConfig(NUM_BLOCKS, 64, steps_in_flight=0),
        Limits(len(ids) + 1, 32, NUM_BLOCKS, ()),
        memory,
        runner,
    )
    _use_before(engine)
    for name, (prompt, answer) in TEXTS.items():
        # it still runs when it is drawn
        engine.add(Request(name, lines[name][: len(prompt.split())], greedy(len(answer.split()) + 1)))
    stages = []
    for num_stored in range(max(STAGES) + 1):
        engine.step()
        if num_stored in STAGES:
            title = f"after {num_stored} more words" if num_stored else "after the prompts"
            stages.append(_look(engine, title, lines, vocabulary))
    return stages


def _use_before(engine: Engine) -> None:
    """Requests of one block each come and leave in another order: who is freed last is used first."""
    for block in range(1, NUM_BLOCKS + 1):
        engine.add(Request(f"block {block}", [1, 1], greedy(2)))
    engine.step()
    for block in (4, 6, 2, 8, 3, 5, 1, 7):
        engine.abort(f"block {block}")


def _look(engine: Engine, title: str, lines: dict[str, list[int]], vocabulary: list[str]) -> Stage:
    words, tables = {}, {}
    for sequence in engine.scheduler.running:
        name, stored = sequence.request.request_id, sequence.num_computed
        words[name] = [vocabulary[token - 1] for token in lines[name][:stored]]
        tables[name] = [
            TableEntry(block, min(BLOCK_SIZE, stored - index * BLOCK_SIZE))
            for index, block in enumerate(sequence.block_ids)
        ]
    return Stage(title, words, tables)


def draw_tables(figure: Any, stages: list[Stage]) -> None:
    rows = figure.subplots(len(stages), 1)
    for axis, stage in zip(rows, stages, strict=True):
        axis.set(xlim=(-0.2, 32.8), ylim=(NUM_BLOCKS + 0.9, -1.6))
        axis.axis("off")
        axis.set_title(stage.title, loc="left")
        _request(axis, stage, "A", 0.0, 0)
        _physical(axis, stage, 11.2)
        _request(axis, stage, "B", 22.4, 1)


CELL = 2.32  # width of a cell that holds a word


def _request(axis: Any, stage: Stage, name: str, left: float, series: int) -> None:
    """Logical blocks above, the block table below."""
    color = look(series).color
    words, entries = stage.words[name], stage.tables[name]
    axis.text(left, -0.7, f"request {name}: logical blocks", fontsize=8, fontweight="bold", color=color)
    for index in range(len(entries)):
        _cells(axis, left + 0.9, index, words[index * BLOCK_SIZE :][:BLOCK_SIZE], color)
        axis.text(left + 0.7, index + 0.5, str(index), ha="right", va="center", fontsize=8)
    top = 4.7
    axis.text(left, top - 0.2, "block table", fontsize=8, fontweight="bold", color=color)
    for column, word in enumerate(("block", "physical", "# filled")):
        axis.text(
            left + 1.2 + 2.6 * column, top + 0.6, word, ha="center", va="center", fontsize=7, color=GREY
        )
    for index, entry in enumerate(entries):
        for column, number in enumerate((index, entry.physical, entry.filled)):
            axis.text(
                left + 1.2 + 2.6 * column,
                top + 1.4 + 0.8 * index,
                str(number),
                ha="center",
                va="center",
                fontsize=8,
            )


def _physical(axis: Any, stage: Stage, left: float) -> None:
    axis.text(left + 0.9, -0.7, "physical blocks", fontsize=8, fontweight="bold")
    held = {
        entry.physical: (name, index)
        for name, entries in stage.tables.items()
        for index, entry in enumerate(entries)
    }
    for block in range(1, NUM_BLOCKS + 1):
        name, index = held.get(block, ("", 0))
        words = stage.words[name][index * BLOCK_SIZE :][:BLOCK_SIZE] if name else []
        color = look(list(TEXTS).index(name)).color if name else LIGHT
        _cells(axis, left + 0.9, block - 1, words, color)
        axis.text(left + 0.7, block - 0.5, str(block), ha="right", va="center", fontsize=8)


def _cells(axis: Any, left: float, top: float, words: list[str], color: str) -> None:
    from matplotlib.patches import Rectangle

    for index in range(BLOCK_SIZE):
        box = (left + index * CELL, top + 0.06)
        axis.add_patch(Rectangle(box, CELL, 0.88, facecolor="white", edgecolor=color, linewidth=1))
        if index < len(words):
            axis.text(
                box[0] + CELL / 2, top + 0.5, words[index], ha="center", va="center",
                fontsize=6.0 if len(words[index]) > 9 else 7.4,
            )  # fmt: skip


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
        for name, lengths in drawn.items():
            for way in WAYS:
                bar.note(f"{name}, {way}")
                spent.append(spend(name, lengths.lengths, way, on_finish=bar, pool_tokens=pool))
        sizes = []
        for size in OTHER_SIZES:
            bar.note(f"blocks of {size}")
            sizes.append(spend(NAMES[0], drawn[NAMES[0]].lengths, "paged", size, bar, pool))
    return _finding(setup, drawn, spent, sizes, pool)


def _finding(
    setup: Setup, drawn: dict[str, SampledLengths], spent: list[Spent], sizes: list[Spent], pool: int
) -> Finding:
    by_way = {(usage.workload, usage.way): usage for usage in spent}
    paged, largest = by_way["sharegpt", "paged"], by_way["sharegpt", "max"]
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
            f"reservations {_percent(largest, 'tokens')} to {_percent(by_way['sharegpt', 'oracle'], 'tokens')} %.",
            lambda figure: _draw_shares(figure, by_way),
            height=4.4,
        ),
        Picture(
            "waste-time",
            f"KV memory over time: ShareGPT lengths, {pool:,} tokens of pool",
            "Reservations hold memory long before it is written, or for nothing; paging takes a block at a time.",
            lambda figure: _draw_time(figure, by_way),
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
            "num_requests": {name: len(sampled.lengths) for name, sampled in drawn.items()},
        },
        _checks(by_way, sizes),
        (
            *(sampled.source for sampled in drawn.values()),
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


def _checks(by_way: dict[tuple[str, str], Spent], sizes: list[Spent]) -> list[Check]:
    paged = by_way["sharegpt", "paged"]
    all_paged = [*(by_way[name, "paged"] for name in NAMES), *sizes]
    slack = ", ".join(f"{usage.max_slack} of {usage.block_size}" for usage in all_paged)
    tokens = [by_way["sharegpt", way].shares["tokens"] for way in ("max", "pow2", "oracle", "paged")]
    return [
        Check(
            "paging wastes less than 4 % at block size 16 on ShareGPT lengths",
            f"{100 * paged.held_waste:.2f} %",
            paged.held_waste < 0.04,
        ),
        Check(
            "a sequence never wastes a whole block, on any lengths and block sizes",
            f"at most {slack}",
            all(usage.max_slack < usage.block_size for usage in all_paged),
        ),
        Check(
            "paging has no external fragmentation",
            f"{max(usage.shares['external'] for usage in all_paged):g}",
            all(usage.shares["external"] == 0 for usage in all_paged),
        ),
        Check(
            "reserving the maximum uses less than 40 % of memory",
            f"{100 * by_way['sharegpt', 'max'].shares['tokens']:.1f} %",
            by_way["sharegpt", "max"].shares["tokens"] < 0.4,
        ),
        Check(
            "tokens' share: max < pow2 < oracle < paged",
            " < ".join(f"{100 * share:.0f}" for share in tokens) + " %",
            tokens == sorted(tokens),
        ),
    ]


def _table(spent: list[Spent]) -> Table:
    rows = [
        [
            usage.workload,
            usage.way,
            *(f"{100 * usage.shares[kind]:.1f}" for kind in KINDS),
            f"{100 * usage.held_waste:.1f}",
            f"{usage.mean_running:.1f}",
            f"{PUBLISHED[usage.way]:.1f}",
        ]
        for usage in spent
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
            str(usage.block_size),
            f"{100 * usage.held_waste:.2f}",
            f"{usage.max_slack}",
            f"{usage.mean_running:.1f}",
        ]
        for usage in sorted(sizes, key=lambda usage: usage.block_size)
    ]
    head = ["block size", "waste of held memory, %", "most in one sequence, tokens", "running"]
    return Table("Paging by block size, ShareGPT lengths", head, rows, left=0)


def _draw_shares(figure: Any, by_way: dict[tuple[str, str], Spent]) -> None:
    from matplotlib.patches import Patch

    axes = figure.subplots(1, len(NAMES), sharey=True)
    for axis, name in zip(axes, NAMES, strict=True):
        for index, way in enumerate(WAYS):
            usage, left = by_way[name, way], 0.0
            for kind in KINDS:
                width = 100 * usage.shares[kind]
                axis.barh(
                    index,
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
                        left + width / 2, index, f"{width:.0f}", ha="center", va="center", fontsize=8,
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


def _draw_time(figure: Any, by_way: dict[tuple[str, str], Spent]) -> None:
    from matplotlib.patches import Patch

    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    for axis, way in zip([*axes[0], *axes[1]], WAYS, strict=True):
        samples = by_way["sharegpt", way].samples
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


def _record(usage: Spent) -> dict[str, Any]:
    return {
        "workload": usage.workload,
        "memory": usage.way,
        "block_size": usage.block_size,
        "shares_of_pool": usage.shares,
        "waste_of_held": usage.held_waste,
        "mean_running": usage.mean_running,
        "max_unwritten_positions_of_a_sequence": usage.max_slack,
        "num_requests": usage.num_requests,
    }


EXPERIMENT = Experiment(
    "waste",
    "What KV memory is spent on",
    "An answer's length is not known in advance. What does reserving for the longest cost, and what does paging?",
    run,
)
