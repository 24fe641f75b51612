"""First come, first served."""

from quire.scheduler.group import Group


def rank(group: Group) -> float:
    """Equal for all: the arrival number decides between equals."""
    return 0.0
