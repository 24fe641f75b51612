"""Drafts in the schedule: when a step waits for a commit, and which sequences verify proposed tokens."""

from collections.abc import Sequence as Listed
from typing import Protocol

from quire.core.draft import DraftRoom, TokenTree
from quire.core.request import Sequence
from quire.memory.paged import PagedMemory, TableDelta


class Drafter(Protocol):
    """Proposes tokens. Drafts change how long an answer takes, never its tokens."""

    def pays(self, running: Listed[Sequence]) -> bool:
        """Whether drafting is worth waiting for the last step's tokens."""
        ...

    def room(self, sequence: Sequence, num_running: int, most: int) -> DraftRoom | None:
        """How far to draft for a sequence whose last token is known, at most `most` tokens; None: not at all."""
        ...

    def draft(self, rooms: Listed[DraftRoom]) -> list[TokenTree]:
        """As many tokens as there is room for, or fewer, or none."""
        ...


def waits_for_drafts(drafter: Drafter, running: Listed[Sequence]) -> bool:
    """Whether the next step is planned only after the last is committed: a draft follows a known token.

    Then all wait, sequences that do not speculate as well: half a batch costs as much as the whole.
    """
    num_pending = max((s.num_pending for s in running), default=0)
    return num_pending > 1 or (num_pending == 1 and drafter.pays(running))


def find_drafts(
    drafter: Drafter, running: Listed[Sequence], memory: PagedMemory, budget: int, delta: TableDelta
) -> dict[int, TokenTree]:
    """Drafts by row, `budget` tokens in all, whose blocks are allocated. No group is preempted for a draft."""
    rooms: list[DraftRoom] = []
    ready = [sequence for sequence in running if _is_ready(sequence)]
    if budget <= 0 or not ready or not drafter.pays(running):
        return {}
    spare = memory.num_free - len(running)  # every sequence may need a block to go on
    for sequence in ready:
        if budget <= 0:
            break
        most = min(budget, sequence.max_computed - len(sequence.token_ids))
        room = drafter.room(sequence, len(running), most) if most > 0 else None
        if room is None:
            continue
        end = sequence.num_computed + 1 + room.num_tokens
        needed = memory.blocks_for(end, len(sequence.block_ids))
        if max(0, needed) > spare or not memory.allocate(sequence, end, delta):
            continue
        spare -= max(0, needed)
        budget -= room.num_tokens
        rooms.append(room)
    if not rooms:
        return {}
    drafts = drafter.draft(rooms)
    if len(running) > 1:
        drafts = trimmed(drafts)
    return {room.sequence.row: draft for room, draft in zip(rooms, drafts, strict=True) if len(draft)}


def _is_ready(sequence: Sequence) -> bool:
    """Beams are compared token by token; a prompt's last token may have forks to make."""
    if sequence.is_beam or sequence.num_pending or not sequence.num_outputs:
        return False
    return sequence.target - sequence.num_computed == 1


def trimmed(drafts: list[TokenTree]) -> list[TokenTree]:
    """Drafts cut to 1, 2 or a multiple of 4 tokens in all: a runner replays steps of sizes that it has recorded."""
    total = sum(map(len, drafts))
    excess = total - (total // 4 * 4 if total > 3 else min(total, 2))
    drafts = list(drafts)
    for _ in range(excess):
        longest = max(range(len(drafts)), key=lambda i: len(drafts[i]))
        drafts[longest] = drafts[longest].first(len(drafts[longest]) - 1)
    return drafts
