"""PrefixIndex: full blocks by the hash of their content."""

import hashlib

from quire.core.request import Ints


class PrefixIndex:
    """Content hash ↔ block id, one block per content.

    A hash covers the model's fingerprint, a salt, and every token up to the block's end (chained through
    its parent), so equal hashes mean equal K and V, and one salt cannot probe another's blocks.
    """

    def __init__(self, num_blocks: int, fingerprint: str) -> None:
        self._fingerprint = fingerprint.encode()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)

    def root(self, salt: str) -> bytes:
        """The parent of a first block."""
        return hashlib.sha256(self._fingerprint + b"\0" + salt.encode()).digest()

    @staticmethod
    def chain(parent: bytes, token_ids: Ints) -> bytes:
        return hashlib.sha256(parent + token_ids.tobytes()).digest()

    def find(self, content: bytes) -> int | None:
        return self._block_of.get(content)

    def knows(self, block: int) -> bool:
        """Whether the block is indexed."""
        return self._hash_of[block] is not None

    def content_of(self, block: int) -> bytes | None:
        return self._hash_of[block]

    def put(self, content: bytes, block: int) -> None:
        """Indexes the block, unless another block with the same content is."""
        if content not in self._block_of:
            self._block_of[content] = block
            self._hash_of[block] = content

    def forget(self, block: int) -> None:
        """The block is about to be overwritten."""
        content = self._hash_of[block]
        if content is not None:
            self._hash_of[block] = None
            del self._block_of[content]

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of = [None] * len(self._hash_of)

    def __len__(self) -> int:
        return len(self._block_of)

    def check_integrity(self) -> None:
        for content, block in self._block_of.items():
            if self._hash_of[block] != content:
                raise RuntimeError(f"the prefix index names block {block} for a content it does not hold")
