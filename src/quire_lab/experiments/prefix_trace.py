"""Chats as the Mooncake trace has them, scaled to a small model: equal prefix hashes become equal tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quire.bench.arrivals import TraceRow, read_trace
from quire.bench.lengths import Lengths
from quire_lab.experiments.data import FILES, DataFolder

TRACE_BLOCK = 512  # tokens that one hash of the trace stands for
# of the stand-in: chats that come back with all they said before, a few system prompts before them
_SYSTEMS, _SYSTEM_BLOCKS, _CHATS_SHARE, _TURNS = 8, 4, 0.15, 6


@dataclass(frozen=True, slots=True)
class ChatTurn:
    prompt_token_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class ChatTrace:
    turns: list[ChatTurn]
    source: str
    is_real: bool
    repeated_share: float  # of the prompts' tokens: what an endless cache would find, all turns one by one


@dataclass(frozen=True, slots=True)
class Scale:
    """Every hash becomes so many tokens; turns that then have more than `max_tokens` are left out."""

    tokens_per_hash: int
    max_tokens: int

    def of(self, row: TraceRow) -> Lengths:
        """Only whole pieces have a hash that may be found again: a prompt is cut to its hashes."""
        prompt = round(row.lengths.num_prompt_tokens * self.tokens_per_hash / TRACE_BLOCK)
        output = round(row.lengths.num_output_tokens * self.tokens_per_hash / TRACE_BLOCK)
        return Lengths(max(1, min(prompt, len(row.prefix_ids) * self.tokens_per_hash)), max(1, output))

    def fits(self, row: TraceRow) -> bool:
        return bool(row.prefix_ids) and self.of(row).total <= self.max_tokens


def chat_trace(
    data: DataFolder,
    count: int,
    scale: Scale,
    token_ids: Sequence[int],
    seed: int,
    *,
    only_returning: bool = False,
) -> ChatTrace:
    """`count` turns in the trace's order: the first that fit, or the first chats' that have several."""
    path = data.path("mooncake")
    rows = [row for row in (read_trace(path) if path else _stand_in(4 * count, seed)) if scale.fits(row)]
    rows = _returning(rows, count) if only_returning else rows[:count]
    which = "turns of the first chats with several turns" if only_returning else "turns"
    source = f"{FILES['mooncake']}" if path else "a stand-in, drawn chats with growing history"
    words = f"chats: the first {len(rows):,} {which} that fit of {source}, every 512 tokens as {scale.tokens_per_hash}"
    turns, repeated_share = _turns(rows, scale, token_ids, seed)
    return ChatTrace(turns, words, path is not None, repeated_share)


def _turns(
    rows: Sequence[TraceRow], scale: Scale, token_ids: Sequence[int], seed: int
) -> tuple[list[ChatTurn], float]:
    maker, size = random.Random(seed), scale.tokens_per_hash
    pieces: dict[int, list[int]] = {}
    turns: list[ChatTurn] = []
    num_repeated = 0
    for row in rows:
        lengths = scale.of(row)
        known = 0
        while known < len(row.prefix_ids) and row.prefix_ids[known] in pieces:
            known += 1
        num_repeated += min(known * size, (lengths.num_prompt_tokens - 1) // size * size)
        for one in row.prefix_ids[known:]:
            if one not in pieces:
                pieces[one] = maker.choices(token_ids, k=size)
        prompt = [token for one in row.prefix_ids for token in pieces[one]]
        turns.append(ChatTurn(prompt[: lengths.num_prompt_tokens], lengths.num_output_tokens))
    total = sum(len(turn.prompt_token_ids) for turn in turns)
    return turns, num_repeated / max(1, total)


def _returning(rows: Sequence[TraceRow], count: int) -> list[TraceRow]:
    """Two turns are of one chat if they agree behind the piece that all of them begin with."""
    chats: dict[tuple[int, ...], list[TraceRow]] = {}
    for row in rows:
        chats.setdefault(row.prefix_ids[:2], []).append(row)
    chosen = [row for turns in chats.values() if len(turns) > 2 for row in turns][:count]
    return sorted(chosen, key=lambda row: row.at or 0.0)


def _stand_in(count: int, seed: int) -> list[TraceRow]:
    """Where there is no trace: chats that grow turn by turn behind one of a few system prompts."""
    source = random.Random(seed)
    rows: list[TraceRow] = []
    histories: list[list[int]] = []
    next_id = _SYSTEMS * _SYSTEM_BLOCKS
    for _ in range(count):
        if not histories or source.random() < _CHATS_SHARE:
            system = source.randrange(_SYSTEMS)
            histories.append([system * _SYSTEM_BLOCKS + i for i in range(_SYSTEM_BLOCKS)])
        history = source.choice(histories[-_TURNS:])
        grown = source.randint(1, 4)
        history += range(next_id, next_id + grown)
        next_id += grown
        lengths = Lengths(len(history) * TRACE_BLOCK, source.randint(64, 768))
        rows.append(TraceRow(lengths, float(len(rows)), tuple(history)))
    return rows
