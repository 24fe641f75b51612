"""Every scheme of stored weights, by name."""

import torch

from quire.quant.codebook import CodeBook
from quire.quant.encoded import Plain, Scheme
from quire.quant.gguf_blocks import GgufBlocks
from quire.quant.int4 import Int4
from quire.quant.scaled import Scaled

FLOATS = ("float32", "float16", "bfloat16")


def named(name: str) -> Scheme:
    """The inverse of `Scheme.name`; KeyError if there is none."""
    if name in FLOATS:
        return Plain(getattr(torch, name))
    for kind in (Int4, CodeBook, GgufBlocks, Scaled):
        scheme = kind.parse(name)
        if scheme is not None:
            return scheme
    raise KeyError(name)
