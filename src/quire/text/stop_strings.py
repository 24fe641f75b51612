"""StopStrings: finds the first stop string in a text that comes in pieces, and holds back what may become one."""

from collections.abc import Sequence


class StopStrings:
    """Takes text and returns the part that cannot belong to a stop string any more.

    The stop string that ends first wins; of several that end together, the longest. The result depends on the text
    alone, not on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""  # the longest end of the text that a stop string begins with
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """New text that may be shown. After a match `matched` is set and no more text is returned."""
        if not self._stops or self.matched is not None or not text:
            return text if self.matched is None else ""
        text = self._held + text
        end = self._match(text)
        if self.matched is not None:
            self._held = ""
            return text[:end] if self._include else text[: end - len(self.matched)]
        cut = min(_prefix_start(text, stop) for stop in self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The held text, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _match(self, text: str) -> int:
        """Sets `matched` if `text` holds a stop string, and returns where the match ends."""
        first = len(text) + 1
        for stop in self._stops:
            start = text.find(stop)
            end = start + len(stop)
            if start >= 0 and (end < first or (end == first and len(stop) > len(self.matched or ""))):
                first, self.matched = end, stop
        return first


def _prefix_start(text: str, stop: str) -> int:
    """Where the longest end of `text` starts that is a proper prefix of `stop`; the text's length if there is none."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
