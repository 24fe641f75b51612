"""By the priority that the request names: lower values first, and first come, first served among equals."""

from quire.scheduler.group import SequenceGroup


def rank(group: SequenceGroup) -> float:
    """Strict: while requests of a lower value keep coming, those of a higher value wait."""
    return group.request.priority
