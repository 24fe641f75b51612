"""Quire serves large language models: attention's memory in pages, many requests in one batch."""

import gc
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quire.core.errors import QuireError
from quire.core.sampling import SamplingParams
from quire.core.structured import StructuredOutput

if TYPE_CHECKING:
    from quire.llm.async_llm import AsyncLLM
    from quire.llm.embedder import Embedder
    from quire.llm.llm import LLM
    from quire.llm.outputs import CompletionOutput, RequestOutput
    from quire.rag.retriever import Retriever

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Embedder",
    "QuireError",
    "RequestOutput",
    "Retriever",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
]

_LAZY = {  # importing quire must not import torch: `quire --help` should answer at once
    "LLM": "quire.llm.llm",
    "AsyncLLM": "quire.llm.async_llm",
    "Embedder": "quire.llm.embedder",
    "RequestOutput": "quire.llm.outputs",
    "CompletionOutput": "quire.llm.outputs",
    "Retriever": "quire.rag.retriever",
}


def load_module(name: str) -> ModuleType:
    """Imports without garbage collection: torch makes many objects and no garbage, and three full collections of them
    are a tenth of a start."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(load_module(_LAZY[name]), name)
