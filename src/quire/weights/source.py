"""Source: the interface to a model's weights, config and tokenizer, the same for every format."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor


class Source(Protocol):
    """Tensors under canonical Hugging Face names, with the content of a model folder's JSON files.

    Files are mapped, not read: a tensor costs memory only while it is used.
    """

    name: str  # the hub id, or the folder's or file's name
    config: Mapping[str, Any]  # as config.json has it
    generation_config: Mapping[str, Any]  # as generation_config.json has it, or empty
    fingerprint: str  # changes when the weights change; keys prefix hashes and converted weights
    num_tensors: int
    num_bytes: int  # of all tensors as stored
    random: bool  # no tensors are named: the consumer fills its parameters from a seed (load_format dummy)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor once, as float32/float16/bfloat16; raises WeightsError on a missing or cut file."""
        ...

    def tokenizer_json(self) -> str | None:
        """The text of tokenizer.json (made from metadata where the format has none), or None."""
        ...

    def tokenizer_config(self) -> Mapping[str, Any]:
        """As tokenizer_config.json has it; `chat_template`, `bos_token`, `eos_token` where known."""
        ...
