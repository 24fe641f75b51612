"""Errors of a grammar, and of compiling it."""

from quire.core.errors import QuireError


class GrammarError(QuireError):
    """The grammar itself is invalid or too expensive: the client must change it, and a retry fails again."""


class GrammarFault(QuireError):
    """Compiling failed for a reason outside the grammar; a retry may succeed."""
