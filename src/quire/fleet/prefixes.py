"""prefix_of: a prompt as chained hashes. PrefixShadow: the hashes that a replica is thought to have in its cache."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

TOKEN_BYTES = 4  # of an int32 id; of text, about as many bytes make a token
# Pieces are longer than a KV block, and longer still behind the first ones: hashing must stay below 50 µs
PIECE, NUM_SHORT, LONG_PIECE = 64, 8, 256  # tokens


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the router knows of a prompt."""

    num_tokens: int
    hashes: Sequence[bytes]  # the n-th covers all pieces up to the n-th, and the salt
    adapter: str | None = None

    def tokens_of(self, num_pieces: int) -> int:
        """The tokens in the first pieces."""
        short = min(num_pieces, NUM_SHORT)
        return short * PIECE + (num_pieces - short) * LONG_PIECE


def prefix_of(data: bytes, salt: str = "", adapter: str | None = None) -> Prefix:
    """Of packed int32 token ids, or of text where no tokenizer is known.

    Chained as memory.blocks chains them: an equal hash means equal tokens, adapter and salt.
    """
    running = hashlib.sha256(f"{adapter or ''}\0{salt}".encode())
    hashes: list[bytes] = []
    size, end = PIECE * TOKEN_BYTES, len(data)
    start = 0
    view = memoryview(data)
    while start + size <= end:
        running.update(view[start : start + size])
        hashes.append(running.digest())
        start += size
        if len(hashes) == NUM_SHORT:
            size = LONG_PIECE * TOKEN_BYTES
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
        self._used: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # when it was last used, its tokens
        self._now = 0

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many of the first pieces are known."""
        used, low, high = self._used, 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in used:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, hashes: Sequence[bytes]) -> int:
        """The replica computes these now, or finds them. Returns the moment, a number that grows."""
        self._now += 1
        used, now = self._used, self._now
        short, long = (now, PIECE), (now, LONG_PIECE)
        for index in range(len(hashes) - 1, -1, -1):
            piece, entry = hashes[index], short if index < NUM_SHORT else long
            if piece in used:
                used.move_to_end(piece)
            else:
                self.num_tokens += entry[1]
            used[piece] = entry
        while self.num_tokens > self.max_tokens and used:
            self._drop_oldest()
        return now

    def share_filled(self, num_more: int) -> float:
        """How much of the cache is in use once that many tokens have come, 0 to 1; 1 where the size is a guess."""
        if self._is_guess or not self.max_tokens:
            return 1.0
        return min(1.0, (self.num_tokens + num_more) / self.max_tokens)

    def last_used(self, piece: bytes) -> int:
        """When it was; 0 if it is not known."""
        return self._used.get(piece, (0, 0))[0]

    def drop_until(self, moment: int) -> None:
        """A piece that was last used then was evicted: so was all that had not been used since."""
        while self._used and next(iter(self._used.values()))[0] <= moment:
            self._drop_oldest()

    def clear(self) -> None:
        self._used.clear()
        self.num_tokens = 0

    def _drop_oldest(self) -> None:
        self.num_tokens -= self._used.popitem(last=False)[1][1]
