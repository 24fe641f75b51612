"""prefix_of: a prompt as chained hashes. PrefixShadow: the hashes that a replica is thought to have in its cache."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

TOKEN_BYTES = 4  # of an int32 id; of text, about as many bytes make a token
# Pieces are longer than a KV block, and longer still behind the first ones: routing must stay below 50 µs
PIECE, NUM_SHORT, LONG_PIECE = 64, 8, 256  # tokens


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the router knows of a prompt."""

    num_tokens: int
    hashes: Sequence[int]  # the n-th covers all pieces up to the n-th, and the salt
    adapter: str | None = None

    def tokens_of(self, num_pieces: int) -> int:
        """The tokens in the first pieces."""
        short = min(num_pieces, NUM_SHORT)
        return short * PIECE + (num_pieces - short) * LONG_PIECE


def prefix_of(data: bytes, salt: str = "", adapter: str | None = None) -> Prefix:
    """Of packed int32 token ids, or of text where no tokenizer is known.

    Chained as memory.blocks chains them, but by Python's own hash, which takes a third of the time of SHA-256 and has a
    secret of this process: different prompts have one value once in 2**60, which sends a request to a worse replica.
    """
    running = hash((adapter, salt))
    hashes: list[int] = []
    short, end = NUM_SHORT * PIECE * TOKEN_BYTES, len(data)
    for size, first, last in ((PIECE, 0, min(short, end)), (LONG_PIECE, short, end)):
        size *= TOKEN_BYTES
        for start in range(first, last - size + 1, size):
            running = hash((running, data[start : start + size]))
            hashes.append(running)
    return Prefix(len(data) // TOKEN_BYTES, hashes, adapter)


class PrefixShadow:
    """What a replica's prefix cache should hold, least recently used first; corrected by what the replica reports.

    A prompt's first pieces are always at least as recent as its last ones, so what is known of a prompt is a prefix of
    it, and a binary search finds its length.
    """

    def __init__(self, max_tokens: int, is_guess: bool = False) -> None:
        """`is_guess`: the size is not the replica's own, so nothing says how much room is left."""
        self.max_tokens = max_tokens  # of the replica's cache
        self._is_guess = is_guess
        self.num_tokens = 0
        self._used: OrderedDict[int, tuple[int, int]] = OrderedDict()  # when it was last used, its tokens
        self.now = 0  # a number that grows with each prompt

    def match(self, hashes: Sequence[int]) -> int:
        """How many of the first pieces are known."""
        used, low, high = self._used, 0, len(hashes)
        if not high or hashes[0] not in used:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in used:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, hashes: Sequence[int]) -> list[int]:
        """The replica computes these `now`, or finds them. Returns when each of the known ones was used before."""
        self.now += 1
        used, before = self._used, []
        short, long = (self.now, PIECE), (self.now, LONG_PIECE)
        for index in range(len(hashes) - 1, -1, -1):
            piece, entry = hashes[index], short if index < NUM_SHORT else long
            last = used.get(piece)
            if last is None:
                self.num_tokens += entry[1]
            else:
                before.append(last[0])
                used.move_to_end(piece)
            used[piece] = entry
        while self.num_tokens > self.max_tokens and used:
            self._drop_oldest()
        before.reverse()
        return before

    def share_filled(self, num_more: int) -> float:
        """How much of the cache is in use once that many tokens have come, 0 to 1; 1 where the size is a guess."""
        if self._is_guess or not self.max_tokens:
            return 1.0
        return min(1.0, (self.num_tokens + num_more) / self.max_tokens)

    def drop_until(self, moment: int) -> None:
        """A piece that was last used then was evicted: so was all that had not been used since."""
        while self._used and next(iter(self._used.values()))[0] <= moment:
            self._drop_oldest()

    def clear(self) -> None:
        self._used.clear()
        self.num_tokens = 0

    def _drop_oldest(self) -> None:
        self.num_tokens -= self._used.popitem(last=False)[1][1]
