"""AWQ and GPTQ: int4 values in int32 words, packed along outputs (AWQ) or inputs (GPTQ)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ModelError, WeightsError
from quire.quant.encoded import Scheme
from quire.quant.int4 import MIDDLE, Int4, pack
from quire.weights.quantized.reader import Get, Header, QuantizedReader, column_order, finite, nibbles

_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # which nibble of a word holds output 0, 1, …
WORD = 8  # values of 4 bits in an int32


class _WordReader(QuantizedReader):
    """What both have: qweight, qzeros [groups, N / 8] and scales [groups, N]."""

    marks = (".qweight",)
    along = 0  # the dimension of qweight that words are packed along
    other: str  # what words along the other dimension are

    def __init__(self, config: Mapping[str, Any], headers: Mapping[str, Header]) -> None:
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            raise ModelError(
                f"{self.method} with {bits} bits is not known here: known is 4: use a 4-bit checkpoint"
            )
        super().__init__(config, headers)
        self._group = config.get("group_size", config.get("q_group_size"))

    def shape_of(self, module: str) -> tuple[int, int]:
        """[N, K] of the weight; ModelError if the words are packed along the other dimension."""
        words, scales = self.header(f"{module}.qweight").shape, self.header(f"{module}.scales").shape
        sizes = [words[0], words[1]]
        sizes[self.along] *= WORD
        if sizes[1] != scales[1]:
            swapped = words[1] * (1 if self.along else WORD) == scales[1]
            shown = f"{self.other}'s" if swapped else "neither AWQ's nor GPTQ's"
            raise ModelError(
                f"{module}: qweight {list(words)} beside scales {list(scales)} is {shown} layout, and config.json "
                f"names quant_method {self.method!r}: take the config.json that belongs to these weights"
            )
        return scales[1], sizes[0]

    def group_of(self, module: str, num_columns: int) -> int:
        groups = self.header(f"{module}.scales").shape[0]
        if groups < 1 or num_columns % groups:
            raise ModelError(f"{module}: {groups} groups do not divide {num_columns} columns: fetch it again")
        self.check_group(module, self._group, num_columns // groups, num_columns)
        return num_columns // groups

    def scales_of(self, module: str, get: Get) -> Tensor:
        name = f"{module}.scales"
        return finite(name, get(name)).t().contiguous()


class Awq(_WordReader):
    method = "awq"
    along = 1
    other = "GPTQ"

    def __init__(self, config: Mapping[str, Any], headers: Mapping[str, Header]) -> None:
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise ModelError(f"AWQ version {version!r} is not known here: known is gemm: convert the model")
        super().__init__(config, headers)

    def describe(self, module: str, get: Get) -> tuple[Scheme, tuple[int, int]]:
        num_rows, num_columns = self.shape_of(module)
        return Int4(self.group_of(module, num_columns), zeros=True), (num_rows, num_columns)

    def parts(self, module: str, scheme: Scheme, shape: tuple[int, int], get: Get) -> dict[str, Tensor]:
        values, zeros = (self._outputs(get(f"{module}.{name}")) for name in ("qweight", "qzeros"))
        return {"packed": pack(values), "scales": self.scales_of(module, get), "zeros": zeros}

    @staticmethod
    def _outputs(words: Tensor) -> Tensor:
        """int32 [k, N / 8] -> uint8 [N, k]."""
        spread = nibbles(words, 1).view(words.shape[0], -1, WORD)[:, :, _AWQ_ORDER]
        return spread.reshape(words.shape[0], -1).t().contiguous()


class Gptq(_WordReader):
    """Version 1 stores zero points minus 1; `checkpoint_format` gptq_v2 stores them as they are."""

    method = "gptq"
    along = 0
    other = "AWQ"

    def __init__(self, config: Mapping[str, Any], headers: Mapping[str, Header]) -> None:
        version = config.get("checkpoint_format") or "gptq"
        if version not in ("gptq", "gptq_v2"):
            raise ModelError(f"GPTQ checkpoint_format {version!r} is not known here: known are gptq, gptq_v2")
        super().__init__(config, headers)
        self._added = 1 if version == "gptq" else 0

    def describe(self, module: str, get: Get) -> tuple[Scheme, tuple[int, int]]:
        num_rows, num_columns = self.shape_of(module)
        group = self.group_of(module, num_columns)
        zeros = not self.config.get("sym", False)
        permuted = bool(self.config.get("desc_act", False)) and f"{module}.g_idx" in self.headers
        return Int4(group, zeros, permuted), (num_rows, num_columns)

    def parts(self, module: str, scheme: Scheme, shape: tuple[int, int], get: Get) -> dict[str, Tensor]:
        assert isinstance(scheme, Int4)
        values = nibbles(get(f"{module}.qweight"), 0).t()
        zeros = nibbles(get(f"{module}.qzeros"), 1).t().contiguous() + self._added
        parts = {"scales": self.scales_of(module, get)}
        if scheme.zeros:
            parts["zeros"] = zeros
        elif (zeros != MIDDLE).any():
            raise WeightsError(
                f"tensor {module}.qzeros has zero point {int(zeros[zeros != MIDDLE][0])}, and config.json says sym=true"
            )
        order = self._order(module, scheme, get)
        if order is not None:
            values, parts["columns"] = values[:, order], order
        return {"packed": pack(values.contiguous()), **parts}

    def _order(self, module: str, scheme: Int4, get: Get) -> Tensor | None:
        name = f"{module}.g_idx"
        found = column_order(name, get(name), scheme.group) if name in self.headers else None
        if not scheme.permuted and found is not None:
            raise WeightsError(f"tensor {name} is in act-order, and config.json says desc_act=false")
        if scheme.permuted and found is None:
            found = torch.arange(self.headers[name].shape[0], dtype=torch.int32)
        return found
