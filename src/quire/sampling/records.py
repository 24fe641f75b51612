"""Inputs and results of the sampler."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.step import BeamSet
from quire.sampling.columns import DeviceColumns, SamplingColumns


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Which tokens some of the rows may take, from outside (a grammar). A set bit allows the token."""

    indices: np.ndarray  # [M] int64, which of the S logits rows are masked
    bits: np.ndarray  # [M, ceil(V / 32)] uint32, token t is bit t % 32 of word t // 32


@dataclass(frozen=True, slots=True)
class SampleRequests:
    """S tokens to choose. Only `token_ids` is on the device: the last token may not have reached the host.

    Where the device has a kernel for whole steps, the sampler also writes each token to `token_ids[row, position]`, so
    that the next step finds it there; elsewhere that is the caller's to do. Such a device takes rows, positions and
    parameters from the `device_` fields; what is None is copied from the host.
    """

    rows: np.ndarray  # [S] int64, the row that receives each token
    positions: np.ndarray  # [S] int64, position of the token being chosen: as many tokens come before it
    columns: SamplingColumns
    token_ids: Tensor  # [max_rows, max_len] int32, each row's tokens; read up to `positions` only
    mask: TokenMask | None = None
    device_rows: Tensor | None = None  # [S] int32 or int64, on the device; negative: padding, nothing is done
    device_positions: Tensor | None = None  # [S] int32 or int64, on the device
    device_columns: DeviceColumns | None = None  # the rows' parameters on the device
    # Samples whose candidates are wanted; the tokens chosen for them mean nothing.
    beams: tuple[BeamSet, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Raw log probabilities of the rows that want them, M of S. K is the most that any of them wants."""

    indices: np.ndarray  # [M] int64, which of the S rows
    num_top: np.ndarray  # [M] int64, how many of the K best each wants
    token_ids: Tensor  # [M] int64, the chosen token
    logprobs: Tensor  # [M] float32, of the chosen token
    ranks: Tensor  # [M] int64, of the chosen token; 1 is the most likely
    top_ids: Tensor  # [M, K] int64, best first
    top_logprobs: Tensor  # [M, K] float32


@dataclass(frozen=True, slots=True)
class BeamTensors:
    """The C best continuations over each of G requests' beams, best first, on the device."""

    requests: tuple[int, ...]  # [G], which of `SampleRequests.beams`
    samples: Tensor  # [G, C] int64, which of the S rows goes on
    token_ids: Tensor  # [G, C] int64
    scores: Tensor  # [G, C] float32


@dataclass(frozen=True, slots=True)
class Sampled:
    """S chosen tokens, on the device."""

    token_ids: Tensor  # [S] int64; 0 where the row failed, so that it can always be embedded
    finite: Tensor  # [S] bool; False: the logits were not finite or every token was banned
    logprobs: LogprobTensors | None = None  # None: none is wanted
    beams: tuple[BeamTensors, ...] = ()  # each of SampleRequests.beams in one of them


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A host array as a device tensor, without waiting for the device."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def device_inputs(requests: SampleRequests, device: torch.device) -> tuple[Tensor, Tensor, DeviceColumns]:
    """Rows, positions and parameters on the device; made from the host's where the caller has none there."""
    rows, positions, columns = requests.device_rows, requests.device_positions, requests.device_columns
    if rows is None:
        rows = on_device(requests.rows, device)
    if positions is None:
        positions = on_device(requests.positions, device)
    if columns is None:
        columns = DeviceColumns(requests.columns, device)
        columns.update(np.unique(requests.rows))
    return rows, positions, columns
