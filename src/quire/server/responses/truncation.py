"""`truncation: auto`: a conversation that is too long loses its oldest turns."""

from collections.abc import Awaitable, Callable

from quire.server.protocol.responses import Item

Counted = Callable[[list[Item]], Awaitable[int]]  # the tokens of a prompt with these items


async def fitted(items: list[Item], room: int, count: Counted) -> list[Item]:
    """The items without as many of the oldest turns as it takes to fit; never without the last.

    A turn begins with what a user says, so that no tool's output is left without its call. System messages
    before the first turn stay.
    """
    if await count(items) <= room:
        return items
    starts = [index for index, item in enumerate(items) if item.get("role") == "user"]
    if len(starts) < 2:
        return items  # whoever takes it will say that it is too long
    head = [item for item in items[: starts[0]] if item.get("role") in ("system", "developer")]
    first, last = 1, len(starts) - 1
    while first < last:  # dropping more can only make it shorter
        middle = (first + last) // 2
        if await count([*head, *items[starts[middle] :]]) <= room:
            last = middle
        else:
            first = middle + 1
    return [*head, *items[starts[first] :]]
