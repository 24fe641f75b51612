"""The protocols of models: what every architecture offers to the runner and to loading."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from quire.core.config import ModelConfig
from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.layers.encoder import EncoderBatch
from quire.layers.lora import LoraBatch
from quire.layers.parameters import Loader, Stateful
from quire.models.encoder_heads import ClassificationHead, MaskHead


class Layer(Protocol):
    """One of a decoder's layers, in two parts: the second may run for fewer tokens than attention does.

    The parts' arguments are private to a model and its own layers.
    """

    @property
    def attend(self) -> Callable[..., Tensor]:
        """Up to attention's result, before its output projection."""
        ...

    @property
    def finish(self) -> Callable[..., Any]:
        """The rest, token by token."""
        ...

    def layers(self) -> dict[str, Stateful]:
        """Sublayers with parameters, by name."""
        ...


class Loadable(Protocol):
    """A model as loading sees it."""

    config: ModelConfig

    def loaders(self) -> dict[str, Loader]:
        """Where each checkpoint tensor goes, by its Hugging Face name. All are needed."""
        ...

    def parameters(self) -> dict[str, Tensor]:
        """After loading: every parameter as it is kept, under the model's own names; views, not copies."""
        ...

    def adopt(self, parameters: Mapping[str, Tensor]) -> None:
        """The inverse of `parameters`, without copying. KeyError, ValueError or WeightsError if they do not fit."""
        ...


class Encoder(Loadable, Protocol):
    """Turns whole sequences into hidden states, in one step and without a KV cache."""

    head: ClassificationHead | MaskHead | None  # None: the hidden states are pooled to one vector

    def __call__(self, batch: EncoderBatch) -> Tensor:
        """Hidden states of all tokens after the last layer: [T, width]."""
        ...


class DecoderModel(Loadable, Protocol):
    """A decoder. Calling it stores the batch's keys and values in the pool."""

    @property
    def recordable(self) -> bool:
        """Whether calling it, loaded, runs native operations only, so that a tape can replay it."""
        ...

    stack: list[Layer]  # in the order they run; an entry may be a StreamedLayer

    def __call__(self, batch: Batch, pool: Pool) -> Tensor:
        """Hidden states after the final norm, of batch.logits_indices only: [L, width]."""
        ...

    def logits(self, hidden: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """[L, width] -> [L, vocab] float32. `lora`: adapters of these rows, if any adds to the output head."""
        ...
