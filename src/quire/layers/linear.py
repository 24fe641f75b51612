"""Linear: a matrix in some number format, with or without a bias. Fused projections are loaded part by part."""

from collections.abc import Callable, Mapping

from torch import Tensor

from quire.layers.embedding import TokenEmbedding
from quire.layers.lora import LoraBatch, LoraGroup
from quire.layers.norm import RMSNorm
from quire.layers.parameters import LayerPart, Loader, Vector, check_shape
from quire.quant.format import Matrix

HEAD = "lm_head"  # a tied head's module, whose tensor is the embedding's


class Linear:
    """y = x @ weight.T (+ bias) (+ residual) (+ the rows' adapters, `lora`)."""

    def __init__(self, matrix: Matrix, bias: Vector | None, silu_mul: Callable[[Tensor], Tensor]) -> None:
        self._matrix = matrix
        self._bias = bias
        self._silu_mul = silu_mul  # for GEMMs that adapters add to before the activation
        self._lora: LoraGroup | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None, lora: LoraBatch | None = None) -> Tensor:
        """x [T, columns], residual [T, rows] -> [T, rows]. The residual may be overwritten."""
        y = self._matrix.linear(x, self._bias.value if self._bias else None, residual)
        group = self._adapted(lora)
        return y if group is None or lora is None else group.add(x, y, lora)

    def silu_mul(self, x: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """For a fused gate | up projection: silu(gate) * up [T, rows / 2]."""
        if self._adapted(lora) is not None:
            return self._silu_mul(self(x, lora=lora))
        return self._matrix.linear_silu_mul(x, self._bias.value if self._bias else None)

    def relu(self, x: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """max(self(x), 0)."""
        if self._adapted(lora) is not None:
            return self(x, lora=lora).relu_()
        return self._matrix.linear_relu(x, self._bias.value if self._bias else None)

    def normed(self, x: Tensor, norm: RMSNorm, lora: LoraBatch | None = None) -> Tensor:
        """self(norm(x))."""
        fused = self._fused(x, norm, lora, silu_mul=False)
        return self(norm(x), lora=lora) if fused is None else fused

    def normed_silu_mul(self, x: Tensor, norm: RMSNorm, lora: LoraBatch | None = None) -> Tensor:
        """self.silu_mul(norm(x))."""
        fused = self._fused(x, norm, lora, silu_mul=True)
        return self.silu_mul(norm(x), lora) if fused is None else fused

    def take_lora(self, group: LoraGroup) -> None:
        self._lora = group

    def _adapted(self, lora: LoraBatch | None) -> LoraGroup | None:
        """The layer's sites, if some row has an adapter there."""
        return self._lora if lora is not None and lora.adds_to(self._lora) else None

    def _fused(self, x: Tensor, norm: RMSNorm, lora: LoraBatch | None, silu_mul: bool) -> Tensor | None:
        """Norm and GEMM in one kernel, if there is one; an adapter needs the norm's result."""
        if self._bias or self._adapted(lora) is not None:
            return None
        return self._matrix.normed(x, norm.weight, norm.eps, silu_mul=silu_mul)

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        """Fills the weight from `first_row` on; rows [n, columns] in any float type."""
        check_shape(rows, (rows.shape[0], self._matrix.num_columns))
        self._matrix.load_rows(first_row, rows)

    def weight_loader(
        self, first_row: int = 0, num_rows: int | None = None, transposed: bool = False
    ) -> Loader:
        """Takes one checkpoint tensor into rows first_row .. first_row + num_rows - 1 (all rows by default).

        `transposed`: the checkpoint has [columns, rows].
        """
        count = self._matrix.num_rows if num_rows is None else num_rows
        shape = (count, self._matrix.num_columns)

        def take(tensor: Tensor) -> None:
            self._matrix.load_rows(first_row, tensor.t() if transposed else tensor)

        part = LayerPart(self, first_row, *shape)
        return Loader(shape[::-1] if transposed else shape, take, (part,))

    def bias_loader(self, first_row: int = 0, num_rows: int | None = None) -> Loader:
        """Takes one checkpoint tensor into a part of the bias."""
        assert self._bias is not None, "this Linear was built without a bias"
        return self._bias.loader(first_row, self._matrix.num_rows if num_rows is None else num_rows)

    def state(self) -> dict[str, Tensor]:
        kept = self._matrix.state()
        if self._bias is not None:
            kept["bias"] = self._bias.value
        return kept

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        self._matrix.adopt(state)
        if self._bias is not None:
            self._bias.adopt(state["bias"])


class OutputHead:
    """Hidden states to logits. A tied head has the embedding's weights, in one memory where `share` is true."""

    def __init__(self, matrix: Matrix, tied_to: TokenEmbedding | None = None, share: bool = False) -> None:
        self._matrix = matrix
        self._tied_to = tied_to
        self._share = share and tied_to is not None
        self._lora: LoraGroup | None = None

    def __call__(self, hidden: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """hidden [L, width] -> logits [L, vocab] float32."""
        logits = self._matrix.logits(hidden)
        if lora is None or self._lora is None or not lora.adds_to(self._lora):
            return logits
        return self._lora.add(hidden, logits, lora)

    def take_lora(self, group: LoraGroup) -> None:
        self._lora = group

    def loader(self) -> Loader:
        """Takes the head's checkpoint tensor; a tied head's is the embedding's, and loads both."""
        shape = (self._matrix.num_rows, self._matrix.num_columns)
        parts: tuple[LayerPart, ...] = (LayerPart(self, 0, *shape, module=HEAD),)
        if self._tied_to is not None:
            parts += self._tied_to.loader().parts
        return Loader(shape, self._take, parts)

    def _take(self, tensor: Tensor) -> None:
        if self._tied_to is not None:
            self._tied_to.load(tensor)
        if self._share:
            self.adopt({})
        else:
            self._matrix.load_rows(0, tensor)

    def state(self) -> dict[str, Tensor]:
        return {} if self._share else self._matrix.state()

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        """A head that shares takes the table that its embedding has by now."""
        if self._share and self._tied_to is not None:
            state = {"weight": self._tied_to.table}
        self._matrix.adopt(state)
