"""StopStrings: finds the first stop string in a text that comes in pieces, and holds back what may become one."""

from collections.abc import Sequence


class StopStrings:
    """Feeds on text and passes on what cannot be part of a stop string any more.

    The stop string that ends first wins; of several that end together, the longest. So the outcome depends
    on the text alone, not on how it was cut. Each letter costs a constant time per stop string, amortised.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # letters of each stop string that the text now ends with
        self._include = include_in_output
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """New text that may be shown. Once a stop string is found, `found` is set and no more text comes."""
        if not self._stops or self.found is not None or not text:
            return text if self.found is None else ""
        for at, letter in enumerate(text):
            best = self._advance(letter)
            if best is not None:
                self.found = best
                shown = self._held + text[: at + 1]
                self._held = ""
                return shown if self._include else shown[: len(shown) - len(best)]
        shown = self._held + text
        cut = len(shown) - max(self._matched)
        self._held = shown[cut:]
        return shown[:cut]

    def flush(self) -> str:
        """What is held back when the text ends."""
        held, self._held = self._held, ""
        return held

    def _advance(self, letter: str) -> str | None:
        """One more letter; the longest stop string that ends with it, if any does."""
        best = None
        for index, stop in enumerate(self._stops):
            borders, matched = self._borders[index], self._matched[index]
            while matched and stop[matched] != letter:
                matched = borders[matched - 1]
            if stop[matched] == letter:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop) and (best is None or len(stop) > len(best)):
                best = stop
        return best


def _borders(pattern: str) -> list[int]:
    """For each prefix, the length of the longest shorter prefix that it ends with (Knuth, Morris, Pratt)."""
    borders, length = [0] * len(pattern), 0
    for at in range(1, len(pattern)):
        while length and pattern[at] != pattern[length]:
            length = borders[length - 1]
        if pattern[at] == pattern[length]:
            length += 1
        borders[at] = length
    return borders
