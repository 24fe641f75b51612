"""Demand: blocks that groups will take, as far as that is known when someone is to be admitted."""

from collections.abc import Iterable

from quire.core.request import Sequence
from quire.memory.interface import Memory
from quire.scheduler.group import SequenceGroup


def blocks_to_resume(memory: Memory, group: SequenceGroup) -> int:
    """Blocks that hold all the group knows: followers share the prompt's full ones with their leader."""
    leader, *others = group.live
    shared = group.request.num_prompt_tokens // memory.block_size
    own = sum(memory.blocks_for(len(s.token_ids)) - shared for s in others)
    return memory.blocks_for(len(leader.token_ids)) + own


def blocks_promised(memory: Memory, running: Iterable[Sequence], forking: Iterable[SequenceGroup]) -> int:
    """Blocks that these will still take: sequences for what they know, groups for followers that are to come."""
    blocks_for = memory.blocks_for
    promised = sum(max(0, blocks_for(s.target) - len(s.block_ids)) for s in running)
    for group in forking:
        shared = group.request.num_prompt_tokens // memory.block_size
        promised += sum(blocks_for(len(s.token_ids)) - shared for s in group.followers)
    return promised
