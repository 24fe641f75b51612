"""Block tables of a small example, as lectures draw them: logical blocks, the table, physical blocks."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from quire.bench.figure import GREY, LIGHT, look
from quire.core.config import SchedulerConfig
from quire.core.ints import ints
from quire.core.request import Request
from quire.core.step import Step, StepResult
from quire.engine.engine import Engine
from quire.engine.validation import Limits
from quire.memory.paged import PagedMemory
from quire.sampling.records import TokenMask
from quire_lab.experiments.engines import greedy

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
    ids = {word: place + 1 for place, word in enumerate(vocabulary)}
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
        engine.add(
            Request(name, lines[name][: len(prompt.split())], greedy(len(answer.split()) + 1))
        )  # it still runs when it is drawn
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
    for place, word in enumerate(("block", "physical", "# filled")):
        axis.text(left + 1.2 + 2.6 * place, top + 0.6, word, ha="center", va="center", fontsize=7, color=GREY)
    for index, entry in enumerate(entries):
        for place, number in enumerate((index, entry.physical, entry.filled)):
            axis.text(
                left + 1.2 + 2.6 * place,
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

    for place in range(BLOCK_SIZE):
        box = (left + place * CELL, top + 0.06)
        axis.add_patch(Rectangle(box, CELL, 0.88, facecolor="white", edgecolor=color, linewidth=1))
        if place < len(words):
            axis.text(
                box[0] + CELL / 2, top + 0.5, words[place], ha="center", va="center",
                fontsize=6.0 if len(words[place]) > 9 else 7.4,
            )  # fmt: skip
