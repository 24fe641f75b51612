"""DiskTierRead: what became of a block that was to be read from the disk."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskTierRead:
    """The content is in the host block now, checked; or it is not `fine` and nothing may be read there."""

    content: bytes
    host: int
    fine: bool
