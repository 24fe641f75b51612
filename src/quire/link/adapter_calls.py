"""AdapterCalls: what operators ask of the engine's adapters, each answered when it is known how it ended."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from quire.core.errors import AdapterError
from quire.engine.adapters import Adapters
from quire.observe.logs import get_logger

log = get_logger(__name__)


class AdapterCalls:
    """What is wrong with an adapter is said to whoever asked for it, and all else goes on."""

    def __init__(self, adapters: Adapters | None, answer: Callable[[int, str | None], None]) -> None:
        """`adapters`: None where they are off. `answer` gets a call's id and what went wrong."""
        self._adapters = adapters
        self._answer = answer

    def load(self, call_id: int, name: str, path: str) -> None:
        """Answered by a later step: the file is read beside them."""
        try:
            ended = self._on().load(name, path)
        except Exception as fault:
            self._answer(call_id, _reason(fault))
        else:
            ended.add_done_callback(partial(self._ended, call_id))

    def unload(self, call_id: int, name: str) -> None:
        error = None
        try:
            self._on().remove(name)
        except Exception as fault:
            error = _reason(fault)
        self._answer(call_id, error)

    def restore(self, name: str, path: str) -> None:
        try:
            self._on().restore(name, path)
        except Exception as fault:
            log.warning("an adapter of the engine before this one is gone: %s", _reason(fault))

    def _on(self) -> Adapters:
        if self._adapters is None:
            raise AdapterError("adapters are off: start with --enable-lora, --lora-modules or --lora-dir")
        return self._adapters

    def _ended(self, call_id: int, ended: Future[None]) -> None:
        if not ended.cancelled():  # else the engine ends, and the other side knows
            fault = ended.exception()
            self._answer(call_id, None if fault is None else _reason(fault))


def _reason(fault: BaseException) -> str:
    """One that nobody foresaw goes to the log too: the adapter that the engine trips over is alone at fault."""
    if isinstance(fault, AdapterError):
        return str(fault)
    log.error("an adapter could not be changed", exc_info=fault)
    return f"{type(fault).__name__}: {fault}"
