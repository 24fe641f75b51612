"""RecordedDecodes: decode passes by their shape, recorded once and replayed without Python."""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from quire.kernels.tape import Arena, Tape
from quire.layers.batch import Batch
from quire.layers.pool import Pool
from quire.models.model import Model

MAX_RECORDED = 64  # shapes kept; recording costs little more than an ordinary pass


@dataclass(frozen=True, slots=True)
class _Recorded:
    tape: Tape
    batch: Batch  # its tensors are what the tape reads
    logits: Tensor  # [T, vocab], what the tape writes


class RecordedDecodes:
    """A batch whose tokens are all sampled has the same operations whenever it has as many rows and tokens.

    How the tokens are spread over the rows is read from the batch's tensors, as everything that changes.
    """

    def __init__(self, model: Model, pool: Pool) -> None:
        self._model = model
        self._pool = pool
        self._arena = Arena()  # one pass runs at a time, so all shapes share their memory
        self._recorded: OrderedDict[tuple[int, int, bool, int], _Recorded] = OrderedDict()

    def logits(self, batch: Batch) -> Tensor:
        """[T, vocab] float32, valid until the next call."""
        kinds = 0 if batch.lora is None else batch.lora.kinds  # of layers that call adapters' kernel too
        shape = len(batch.context_lens), len(batch.token_ids), batch.trees is not None, kinds
        found = self._recorded.get(shape)
        if found is not None:
            self._recorded.move_to_end(shape)
            found.tape.replay()
            return found.logits
        with Tape(self._arena) as tape:
            logits = self._arena.borrowed(self._model.logits(self._model(batch, self._pool), batch.lora))
        self._recorded[shape] = _Recorded(tape, batch, logits)
        if len(self._recorded) > MAX_RECORDED:
            self._recorded.popitem(last=False)
        return logits
