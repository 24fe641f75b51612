"""bitsandbytes: NF4 and FP4 blocks with their absmaxes, nested or not, and int8 with a scale per output."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ModelError, WeightsError
from quire.kernels.encoded_linear.books import CODES, dynamic_map
from quire.quant.codebook import NESTED_BLOCK, CodeBook, nested_shape
from quire.quant.encoded import Scheme
from quire.quant.scaled import Scaled
from quire.weights.quantized.reader import Get, Header, QuantizedReader, finite

_STATE = ".weight.quant_state.bitsandbytes__"
_CODES = {"nf4": "nf4", "fp4": "fp4bnb"}


class BitsAndBytes(QuantizedReader):
    method = "bitsandbytes"
    marks = (".weight.quant_map", ".SCB")

    def __init__(self, config: Mapping[str, Any], headers: Mapping[str, Header]) -> None:
        super().__init__(config, headers)
        self._states: dict[str, dict[str, Any]] = {}
        four = any(name.endswith(".weight.quant_map") for name in headers)
        asked = bool(config.get("load_in_4bit", config.get("_load_in_4bit", False)))
        if four != asked:
            raise ModelError(
                f"config.json says load_in_4bit={asked}, and the tensors hold {4 if four else 8} bits: take the "
                "config.json that belongs to these weights"
            )

    def describe(self, module: str, get: Get) -> tuple[Scheme, tuple[int, int]]:
        if f"{module}.SCB" in self.headers:
            num_rows, num_columns = self.header(f"{module}.weight").shape
            return Scaled("int8"), (num_rows, num_columns)
        state = self._state(module, get)
        kind, block, shape = state.get("quant_type"), state.get("blocksize", 64), state.get("shape") or []
        if kind not in _CODES or len(shape) != 2:
            raise ModelError(
                f"{module}: quant_type {kind!r} of shape {shape} is not known: known are nf4, fp4"
            )
        nested = "nested_blocksize" in state or f"{module}.weight.nested_absmax" in self.headers
        if nested and state.get("nested_blocksize", NESTED_BLOCK) != NESTED_BLOCK:
            raise ModelError(
                f"{module}: nested_blocksize={state['nested_blocksize']} is not known: only 256 is"
            )
        return CodeBook(_CODES[kind], int(block), nested), (int(shape[0]), int(shape[1]))

    def _state(self, module: str, get: Get) -> dict[str, Any]:
        """The JSON object that a tensor of bytes holds."""
        if module not in self._states:
            name = next((n for n in self.headers if n.startswith(f"{module}{_STATE}")), None)
            if name is None:
                raise ModelError(f"{module} has no tensor *{_STATE}nf4 or fp4: fetch the checkpoint again")
            self._states[module] = dict(json.loads(bytes(get(name).tolist())))
        return self._states[module]

    def parts(self, module: str, scheme: Scheme, shape: tuple[int, int], get: Get) -> dict[str, Tensor]:
        weight = f"{module}.weight"
        if isinstance(scheme, Scaled):
            scales = finite(f"{module}.SCB", get(f"{module}.SCB"), allow_zero=True)
            return {"weight": get(weight), "scales": (scales.float() / 127).view(-1, 1)}
        assert isinstance(scheme, CodeBook)
        self._check_code(f"{weight}.quant_map", CODES[scheme.code], get)
        packed = get(weight)
        if packed.numel() * 2 != shape[0] * shape[1] or packed.dtype is not torch.uint8:
            raise WeightsError(
                f"tensor {weight} has {packed.numel():,} bytes where {list(shape)} needs {shape[0] * shape[1] // 2:,}"
            )
        scheme.layout(*shape)
        absmax = get(f"{weight}.absmax").view(shape[0], -1)
        parts = {"packed": packed.view(shape[0], -1), "absmax": absmax}
        if not scheme.nested:
            return parts | {"absmax": finite(f"{weight}.absmax", absmax.float(), allow_zero=True)}
        self._check_code(f"{weight}.nested_quant_map", dynamic_map(), get)
        name = f"{weight}.nested_absmax"
        scales = finite(name, get(name).float(), allow_zero=True)
        if scales.numel() != (needed := -(-absmax.numel() // NESTED_BLOCK)):
            raise WeightsError(f"tensor {name} has {scales.numel()} scales where {needed} are needed")
        parts["nested"] = nested_shape(scales, (absmax.shape[0], absmax.shape[1]))
        offset = torch.tensor([float(self._state(module, get)["nested_offset"])])
        parts["offset"] = finite(f"{weight}.nested_offset", offset, allow_zero=True)
        return parts

    def _check_code(self, name: str, known: tuple[float, ...], get: Get) -> None:
        found = get(name).float()
        if found.shape != (len(known),) or not torch.allclose(found, torch.tensor(known), atol=1e-6):
            raise WeightsError(f"tensor {name} is not the code book of {self.method}")
