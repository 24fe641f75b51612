"""TrainedModel: a model's forward pass with gradients to its LoRA matrices, and the loss of packed sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.config import ModelConfig
from quire.core.errors import ModelError
from quire.layers.attention import Pool
from quire.layers.batch import Batch, Span
from quire.models.loading import feed
from quire.models.model import DecoderModel
from quire.models.registry import build
from quire.train.frozen import FrozenFormat
from quire.train.layers import RecomputedLayer, TrainFactory
from quire.train.lora import LoraParameters, install
from quire.weights.architectures import KNOWN
from quire.weights.source import Source

IGNORED = -100  # a label without a loss
LOSS_ROWS = {"cpu": 512, "cuda": 2048}  # tokens whose logits exist at once
TRAINED = ("llama", "gpt_variants")  # files of models/


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of one sequence, and for each the label that it must predict: the next token, or IGNORED."""

    token_ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def num_trained(self) -> int:
        return sum(label != IGNORED for label in self.labels)


def check_trainable(config: ModelConfig) -> None:
    """Raises ModelError for an architecture without a training forward."""
    if KNOWN[config.architecture].file not in TRAINED or not config.hf.get("do_layer_norm_before", True):
        known = ", ".join(sorted(name for name, k in KNOWN.items() if k.file in TRAINED))
        raise ModelError(
            f"{config.architecture} of this kind (a mixture of experts, or norms after each sum) cannot be trained: "
            f"{known} can"
        )


class TrainedModel:
    """A frozen base with trained matrices. `model` is the class that serving runs, built of other layers."""

    def __init__(
        self, config: ModelConfig, number_format: FrozenFormat, device: torch.device, max_length: int
    ) -> None:
        check_trainable(config)
        self.config, self.device, self.number_format = config, device, number_format
        self._factory = TrainFactory(number_format, device, max_position=max_length)
        self.model: DecoderModel = build(config, self._factory)
        self.parameters = LoraParameters(rank=1, alpha=1.0)

    def load(self, source: Source, seed: int = 0) -> None:
        feed(source, self.model.loaders(), self.device, None, seed)

    @property
    def base_bytes(self) -> int:
        """Of frozen matrices and tables, as they are kept."""
        tables = [
            table.stored.num_bytes if table.stored else table.table.nbytes for table in self._factory.tables
        ]
        return sum(matrix.kept_bytes for matrix in self.number_format.matrices) + sum(tables)

    def adapt(
        self, parameters: LoraParameters, targets: Sequence[str], seed: int = 0, recompute: bool = False
    ) -> None:
        """From now on with these matrices at every target; `recompute`: with activation checkpointing. Once only."""
        self.parameters = parameters
        install(self.model.loaders(), targets, parameters, self.device, seed)
        if recompute:
            self.model.stack[:-1] = [cast(Any, RecomputedLayer(layer)) for layer in self.model.stack[:-1]]

    def loss(self, examples: Sequence[Example]) -> Tensor:
        """The sum of the cross entropies of all labels of these sequences, computed as one packed batch."""
        return self.losses(examples).sum()

    def losses(self, examples: Sequence[Example], adapted: bool = True) -> Tensor:
        """As `loss`, of each sequence [len(examples)]. `adapted=False`: of the base model."""
        labels = [label for example in examples for label in example.labels]
        rows = [row for row, label in enumerate(labels) if label != IGNORED]
        hidden = self.model(self._batch(examples, rows, adapted), cast(Pool, None))
        wanted = torch.tensor([labels[row] for row in rows], dtype=torch.int64, device=self.device)
        each = _CrossEntropy.apply(hidden, wanted, self.model)
        owners = [index for index, example in enumerate(examples) for _ in range(example.num_trained)]
        sums = torch.zeros(len(examples), device=self.device)
        return sums.index_add(0, torch.tensor(owners, dtype=torch.int64, device=self.device), each)

    def _batch(self, examples: Sequence[Example], rows: list[int], adapted: bool) -> Batch:
        lengths = [len(example.token_ids) for example in examples]
        bounds = [0, *accumulate(lengths)]
        ids = torch.tensor([i for example in examples for i in example.token_ids], device=self.device)
        positions = torch.cat([torch.arange(n, device=self.device) for n in lengths])
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        lora = self.parameters.adapted if adapted else None
        return Batch(
            token_ids=ids,
            positions=positions,
            slots=nothing,
            query_starts=torch.tensor(bounds, dtype=torch.int32, device=self.device),
            context_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            block_tables=nothing,
            logits_indices=torch.tensor(rows, dtype=torch.int64, device=self.device),
            fresh=tuple(Span(first, last, last - first) for first, last in pairwise(bounds)),
            lora=lora,
            wanted_lora=lora,
        )


class _CrossEntropy(torch.autograd.Function):
    """Of each row; the gradient is computed with the loss, so that logits of few rows exist at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, labels: Tensor, model: DecoderModel) -> Tensor:
        losses, grads = [], []
        step = LOSS_ROWS.get(hidden.device.type, LOSS_ROWS["cpu"])
        for first in range(0, len(labels), step):
            part = hidden[first : first + step].detach().requires_grad_(hidden.requires_grad)
            with torch.enable_grad():
                loss = F.cross_entropy(model.logits(part), labels[first : first + step], reduction="none")
                if hidden.requires_grad:
                    # rows are independent: one pass gives the gradient of each row's own loss
                    grads.append(torch.autograd.grad(loss.sum(), part)[0])
            losses.append(loss.detach())
        if grads:
            ctx.save_for_backward(torch.cat(grads))
        return torch.cat(losses) if losses else hidden.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return rows * grads[0][:, None].to(rows.dtype), None, None
