"""RecordedDecodes: decode passes by batch size, recorded once and replayed without Python."""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from quire.kernels.tape import Tape
from quire.layers.batch import Batch
from quire.layers.pool import Pool
from quire.models.model import Model

MAX_RECORDED = 8  # batch sizes kept; recording costs no more than an ordinary pass


@dataclass(frozen=True, slots=True)
class _Recorded:
    tape: Tape
    batch: Batch  # its tensors are what the tape reads
    logits: Tensor  # [R, vocab], what the tape writes


class RecordedDecodes:
    """A batch of one token per row always has the same operations, so they are recorded per row count."""

    def __init__(self, model: Model, pool: Pool) -> None:
        self._model = model
        self._pool = pool
        self._recorded: OrderedDict[int, _Recorded] = OrderedDict()

    def logits(self, batch: Batch) -> Tensor:
        """[R, vocab] float32, valid until the next call."""
        num_rows = len(batch.token_ids)
        found = self._recorded.get(num_rows)
        if found is not None:
            self._recorded.move_to_end(num_rows)
            found.tape.replay()
            return found.logits
        with Tape() as tape:
            logits = self._model.logits(self._model(batch, self._pool))
        self._recorded[num_rows] = _Recorded(tape, batch, logits)
        if len(self._recorded) > MAX_RECORDED:
            self._recorded.popitem(last=False)
        return logits
