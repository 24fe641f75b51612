"""compressed-tensors (llm-compressor): packed int4 and int8; int8 and fp8 with scales per channel, group or block."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ModelError, WeightsError
from quire.quant.encoded import Scheme
from quire.quant.int4 import Int4, pack, unpack
from quire.quant.scaled import Scaled
from quire.weights.quantized.reader import Get, Header, QuantizedReader, column_order, finite, nibbles

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_VALUES = {"I8": "int8", "F8_E4M3": "fp8"}


class CompressedTensors(QuantizedReader):
    method = "compressed-tensors"
    marks = (".weight_packed", ".weight_scale")

    def __init__(self, config: Mapping[str, Any], headers: Mapping[str, Header]) -> None:
        groups = (config.get("config_groups") or {}).values()
        named = [config.get("format"), *(group.get("format") for group in groups)]
        for name in named:
            if name is not None and name not in FORMATS:
                raise ModelError(
                    f"compressed-tensors format {name!r} is not known here: known are {', '.join(FORMATS)}"
                )
        super().__init__(config, headers)
        self._weights = [group.get("weights") or {} for group in groups]

    def describe(self, module: str, get: Get) -> tuple[Scheme, tuple[int, int]]:
        scales = self.header(f"{module}.weight_scale").shape
        packed = self.headers.get(f"{module}.weight_packed")
        if packed is None:
            return self._whole_values(module, scales)
        num_rows, num_columns = (int(n) for n in get(f"{module}.weight_shape"))
        bits = next((b for b in (4, 8) if -(-num_columns * b // 32) == packed.shape[1]), None)
        if bits is None or packed.shape[0] != num_rows or packed.dtype != "I32":
            raise ModelError(
                f"{module}: weight_packed is {packed.dtype} {list(packed.shape)}, not {num_rows} × {num_columns} "
                "values of 4 or 8 bits in I32: fetch the checkpoint again, or use one in W4A16 or W8A16"
            )
        args = self._arguments(module, bits, "int")
        group = num_columns // max(1, scales[-1])
        if args.get("strategy") in ("group", "channel"):
            self.check_group(module, args.get("group_size"), group, num_columns)
        zeros = f"{module}.weight_zero_point" in self.headers
        if zeros == bool(args.get("symmetric", True)):
            raise ModelError(
                f"{module}: config.json says symmetric={args.get('symmetric')}, and weight_zero_point is "
                f"{'there' if zeros else 'missing'}: take the config.json that belongs to these weights"
            )
        if bits == 8:
            if zeros:
                raise ModelError(f"{module}: 8 bits with zero points are not known here: use a symmetric one")
            return Scaled("int8", 1, group), (num_rows, num_columns)
        permuted = f"{module}.weight_g_idx" in self.headers
        return Int4(group, zeros, permuted), (num_rows, num_columns)

    def _whole_values(self, module: str, scales: tuple[int, ...]) -> tuple[Scheme, tuple[int, int]]:
        weight = self.header(f"{module}.weight")
        kind = _VALUES.get(weight.dtype)
        if kind is None or len(weight.shape) != 2:
            raise ModelError(
                f"tensor {module}.weight is {weight.dtype} beside a weight_scale: known are {', '.join(_VALUES)}"
            )
        args = self._arguments(module, 8, "int" if kind == "int8" else "float")
        if not args.get("symmetric", True):
            raise ModelError(
                f"{module}: 8-bit weights with zero points are not known here: use a symmetric scheme"
            )
        num_rows, num_columns = weight.shape
        if args.get("strategy") == "block":
            high, wide = args.get("block_structure") or (128, 128)
            return Scaled(kind, int(high), int(wide)), (num_rows, num_columns)
        groups = scales[-1] if len(scales) == 2 else 1
        return Scaled(kind, 1, 0 if groups == 1 else num_columns // groups), (num_rows, num_columns)

    def _arguments(self, module: str, bits: int, kind: str) -> Mapping[str, Any]:
        """The weights' entry of config.json that these tensors belong to."""
        for args in self._weights:
            if args.get("num_bits") == bits and args.get("type", "int") == kind:
                return args
        named = ", ".join(f"{a.get('type', 'int')}{a.get('num_bits')}" for a in self._weights) or "no weights"
        raise ModelError(
            f"{module}: its tensors hold {kind}{bits}, and config.json's config_groups name {named}: take the "
            "config.json that belongs to these weights"
        )

    def parts(self, module: str, scheme: Scheme, shape: tuple[int, int], get: Get) -> dict[str, Tensor]:
        name = f"{module}.weight_scale"
        scales = finite(name, get(name))
        if isinstance(scheme, Scaled):
            return self._scaled(module, scheme, shape, scales.float(), get)
        assert isinstance(scheme, Int4)
        packed = get(f"{module}.weight_packed").contiguous().view(torch.uint8)[:, : shape[1] // 2]
        parts = {"packed": packed, "scales": scales}
        if scheme.zeros:
            zeros = get(f"{module}.weight_zero_point")
            parts["zeros"] = nibbles(zeros, 0)[: shape[0]] if zeros.dtype is torch.int32 else zeros + 8
            parts["zeros"] = parts["zeros"].to(torch.uint8)
        if scheme.permuted:
            name = f"{module}.weight_g_idx"
            order = column_order(name, get(name), scheme.group)
            if order is None:
                order = torch.arange(shape[1], dtype=torch.int32)
            parts["packed"], parts["columns"] = pack(unpack(packed)[:, order]), order
        return parts

    def _scaled(
        self, module: str, scheme: Scaled, shape: tuple[int, int], scales: Tensor, get: Get
    ) -> dict[str, Tensor]:
        if f"{module}.weight_packed" in self.headers:
            words = get(f"{module}.weight_packed").contiguous().view(torch.uint8)[:, : shape[1]]
            return {"weight": (words ^ 128).view(torch.int8), "scales": scales}
        if scales.numel() == 1 and scheme.tile_rows == 1:  # one scale for the whole weight
            scales = scales.reshape(1, 1).expand(shape[0], 1)
        weight = get(f"{module}.weight")
        if scheme.kind == "fp8" and (weight.view(torch.uint8) & 127 == 127).any():  # its only other values
            raise WeightsError(f"tensor {module}.weight holds NaN")
        return {"weight": weight, "scales": scales.reshape(len(scales), -1).contiguous()}
