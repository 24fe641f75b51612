"""What can be wrong with a grammar, and what with the machinery around it."""

from quire.core.errors import QuireError


class GrammarError(QuireError):
    """A grammar that cannot be honoured: whoever sent it must change it. The same grammar fails again."""


class GrammarFault(QuireError):
    """Grammars cannot be compiled here and now; the same grammar may be fine another time."""
