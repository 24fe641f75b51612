"""Kernels that start while the one before ends (programmatic dependent launch, Hopper and later).

A kernel that calls `launch_dependents` lets the next one start early. The next one fetches weights meanwhile, and waits
for the end of this one before it reads results or writes: those of `encoded_linear` are launched so, and Triton's with
the options EARLY, whose first statement is `wait_for_results`. Every program must wait, those without work too: a
kernel that ends before the one in front of it would let a third one start too soon. Kernels that are launched
plainly are not affected.
"""

import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_SUPPORTED = tl.constexpr(
    os.environ.get("TRITON_INTERPRET") != "1"
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability() >= (9, 0)
)
EARLY: dict[str, bool] = {"launch_pdl": True} if _SUPPORTED.value else {}  # options of a launch


@triton.jit
def launch_dependents():
    if _SUPPORTED:
        gdc_launch_dependents()


@triton.jit
def wait_for_results():
    """Of all kernels before; first in a kernel that is launched with EARLY."""
    if _SUPPORTED:
        gdc_wait()
