"""First come, first served."""

from quire.scheduler.group import SequenceGroup


def rank(group: SequenceGroup) -> float:
    """Equal for all: the arrival number decides between equals."""
    return 0.0
