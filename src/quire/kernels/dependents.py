"""A kernel that lets the next one start early (programmatic dependent launch, Hopper and later).

The next kernel fetches weights while this one runs, and waits for its end before it reads results: those of
`encoded_linear` are launched so. Kernels that are launched plainly are not affected.
"""

import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

_SUPPORTED = tl.constexpr(
    os.environ.get("TRITON_INTERPRET") != "1"
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability() >= (9, 0)
)


@triton.jit
def launch_dependents():
    if _SUPPORTED:
        gdc_launch_dependents()
