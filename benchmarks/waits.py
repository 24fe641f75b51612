"""How often the host waits for the device in a step: what torch says of its own operations, and events and streams."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from quire import LLM, SamplingParams
from quire.core.request import Request

SAID = (
    "called a synchronizing CUDA operation"  # torch's words for a wait, and not those about the mode itself
)
CALLS = ((torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda, "synchronize"))


def longest_waits(llm: LLM, prompts: list[list[int]], samplings: list[SamplingParams]) -> list[str]:
    """Where the host waited in the step in which it waited most often: one line for each wait."""
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        llm.engine.add(Request(str(i), prompt, sampling))
    most: list[str] = []
    while llm.engine.has_work:
        with counted() as waits:
            llm.engine.step()
        most = max(most, waits, key=len)
    return most


@contextmanager
def counted() -> Iterator[list[str]]:
    """A list that grows with every wait."""
    waits: list[str] = []
    with warnings.catch_warnings(record=True) as found, ExitStack() as stack:
        warnings.simplefilter("always")
        for owner, name in CALLS:
            stack.enter_context(patch.object(owner, name, _noting(getattr(owner, name), waits, name)))
        if torch.cuda.is_available():
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
        yield waits
    waits += [f"{one.filename}:{one.lineno}" for one in found if SAID in str(one.message)]


def _noting(call: Callable[..., Any], waits: list[str], name: str) -> Callable[..., Any]:
    def noted(*given: Any, **named: Any) -> Any:
        waits.append(name)
        return call(*given, **named)

    return noted
