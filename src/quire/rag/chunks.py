"""Texts to chunks, which are found and cited, and chunks to windows, which the encoder reads whole."""

from array import array
from dataclasses import dataclass

from quire.text.tokenizer import Tokenizer

MAX_TOKENS, OVERLAP = 800, 400  # OpenAI's
MIN_CHUNK, MAX_CHUNK = 100, 4096
WINDOW = 254  # tokens of all-MiniLM's 256, without its first and last
WINDOW_OVERLAP = 32
_PIECE = 1 << 16  # characters that are encoded at once
_LONGEST = 32  # characters: an unknown word is one token, however long; it counts as several


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a text; `start` and `end` count characters."""

    start: int
    end: int
    text: str


def check_chunking(
    max_tokens: int, overlap: int, names: tuple[str, str] = ("max_chunk_size_tokens", "chunk_overlap_tokens")
) -> None:
    """ValueError for sizes outside OpenAI's limits, with the fields called by `names`."""
    if not MIN_CHUNK <= max_tokens <= MAX_CHUNK:
        raise ValueError(f"{names[0]} is {max_tokens}: give {MIN_CHUNK} to {MAX_CHUNK}")
    if not 0 <= overlap <= max_tokens // 2:
        raise ValueError(f"{names[1]} is {overlap}: give 0 to {max_tokens // 2}, half of {names[0]}")


def chunk_text(
    text: str, tokenizer: Tokenizer, max_tokens: int = MAX_TOKENS, overlap: int = OVERLAP
) -> list[Chunk]:
    """Chunks of up to `max_tokens` tokens; each begins `overlap` tokens before the end of the one before, or a few
    more, because a chunk begins and ends between words where it can."""
    spans = _Spans(text, tokenizer)
    chunks, first = [], 0
    while first < len(spans):
        end = spans.between_words(first + max_tokens, first + max_tokens // 2)
        chunks.append(spans.chunk(first, end))
        if end == len(spans):
            break
        first = spans.between_words(end - overlap, max(first + 1, end - overlap - max_tokens // 8))
    return chunks


def windows(text: str, tokenizer: Tokenizer, max_tokens: int = WINDOW) -> list[str]:
    """Parts of a chunk that have `max_tokens` tokens at most, of about equal size, with some overlap."""
    spans = _Spans(text, tokenizer)
    if len(spans) <= max_tokens:
        return [text] if len(spans) else []
    slack = WINDOW_OVERLAP // 2  # bounds move up to this far, to be between words
    count = -(-(len(spans) - WINDOW_OVERLAP) // (max_tokens - slack - WINDOW_OVERLAP))
    size = -(-(len(spans) + (count - 1) * WINDOW_OVERLAP) // count)
    starts = [at * (len(spans) - size) // (count - 1) for at in range(count)]
    firsts = [spans.between_words(start, max(0, start - slack)) for start in starts]
    ends = [spans.between_words(start + size, start + size - slack) for start in starts]
    return [spans.chunk(first, end).text for first, end in zip(firsts, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class WaitingChunk:
    """A chunk without vectors."""

    id: int
    store_id: str
    file_id: str
    text: str
    shared_from: int | None  # the character from which on the text is also the next chunk's
    shared_to: int | None  # up to which it is also the previous one's

    @property
    def parts(self) -> list[str]:
        """The text, cut where about half of it is a neighbour's too: equal parts are embedded once."""
        at = self.shared_from if self.shared_from is not None else self.shared_to
        if at is None or not 0.4 <= at / len(self.text) <= 0.6:
            return [self.text]
        return [self.text[:at].strip(), self.text[at:].strip()]


class _Spans:
    """Where the tokens of a text are, in characters. Long texts are encoded in pieces that end between words."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._text = text
        self._starts, self._ends = array("I"), array("I")
        begin = 0
        while begin < len(text):
            end = _piece_end(text, begin)
            for start, stop in tokenizer.offsets(text[begin:end]):
                self._append(begin + start, begin + stop)
            begin = end

    def __len__(self) -> int:
        return len(self._starts)

    def between_words(self, token: int, least: int) -> int:
        """The last token up to `token` and down to `least` that begins after white space, or `token` if none does."""
        if token >= len(self):
            return len(self)
        for at in range(token, least, -1):
            if self._ends[at - 1] < self._starts[at]:
                return at
        return token

    def chunk(self, first: int, end: int) -> Chunk:
        start, stop = self._starts[first], self._ends[end - 1]
        return Chunk(start, stop, self._text[start:stop])

    def _append(self, start: int, end: int) -> None:
        while end - start > _LONGEST:
            self._starts.append(start)
            self._ends.append(start + _LONGEST)
            start += _LONGEST
        if end > start:
            self._starts.append(start)
            self._ends.append(end)


def _piece_end(text: str, begin: int) -> int:
    end = begin + _PIECE
    if end >= len(text):
        return len(text)
    found = max(text.rfind(" ", begin + _PIECE // 2, end), text.rfind("\n", begin + _PIECE // 2, end))
    return end if found < 0 else found
