"""DeviceOps: what a Runner asks of a device, and the records between them. CpuOps and CudaOps implement it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.core.step import PromptLogprobs, Step
from quire.models.model import DecoderModel
from quire.runner.adapters import AdapterSlots
from quire.runner.step_inputs import ScoredRow, StepInputs
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.records import BeamTensors, Sampled, SampleRequests, TokenMask

SCORED_PER_PASS = 256  # prompt positions turned into logits at once: bounds memory, not speed
T = TypeVar("T")
R = TypeVar("R", covariant=True)


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    record_decodes: bool  # replay decode passes instead of calling every layer
    activation_dtype: torch.dtype = torch.float32
    deterministic: bool = False  # on a GPU: a request's tokens do not depend on its neighbours


@dataclass(slots=True)
class ForwardPass:
    """A step whose forward pass ran, or is queued on the device."""

    inputs: StepInputs
    sample_positions: np.ndarray  # [S] int64, where the sampled token will stand
    logits: Tensor | None  # [S, vocab], used up by sampling; None: nothing is sampled
    scores: tuple[PromptLogprobs, ...] = ()
    device_rows: Tensor | None = None  # [S] ints, `inputs.sample_rows` on a GPU
    device_positions: Tensor | None = None  # [S] ints, `sample_positions` on a GPU


@dataclass(frozen=True, slots=True)
class HostSamples:
    """What a step sampled, in host memory once `arrived`."""

    token_ids: Tensor  # [S] int64
    finite: Tensor  # [S] bool
    sampled: Sampled | None = None  # None: nothing was sampled; of it, the logprobs are in host memory
    beams: tuple[BeamTensors, ...] = ()
    arrived: torch.cuda.Event | None = None  # None: it is there
    ended: float = 0.0  # when it was there, where nothing is late


class Submitted(Protocol[R]):
    def result(self) -> R:
        """Waits for the work's end where it runs in another thread."""
        ...


class DeviceOps(Protocol):
    """One device: how its rows change, its passes run and its samples come back. Calls come in the order of steps."""

    compiles: bool  # kernels compile or are captured: worth a warm-up
    tiles: str  # attention's: "tuned", "default" or "fixed"; empty where its kernel has none
    row_tokens: Tensor  # [max_rows, max_len] int32, each row's tokens
    row_tables: Tensor  # [max_rows, max_blocks] int32, each row's block ids

    def submit(self, work: Callable[[], T]) -> Submitted[T]:
        """Runs `work` at once, or in a worker thread after all submitted before it."""
        ...

    def change_rows(self, step: Step) -> None:
        """Starts rows, writes forced tokens, drafts and table entries. May be called again after it raised."""
        ...

    def forward(self, step: Step) -> ForwardPass: ...

    def sample_requests(self, forward: ForwardPass, mask: TokenMask | None) -> SampleRequests: ...

    def write_tokens(self, forward: ForwardPass, sampled: Sampled) -> None:
        """Makes the sampled tokens the rows' own, where the sampler has not."""
        ...

    def to_host(self, sampled: Sampled | None, num_samples: int) -> HostSamples: ...

    def eager(self) -> AbstractContextManager[None]:
        """Passes inside it run without graphs."""
        ...

    def capture(self, seconds: float) -> int:
        """Records passes for about `seconds`; how many there are then."""
        ...

    def prepare_thread(self) -> None:
        """To be called by a thread that will launch steps and did not build the runner."""
        ...

    def close(self) -> None: ...


def prompt_scores(
    model: DecoderModel, hidden: Tensor, inputs: StepInputs, row_tokens: Tensor, adapters: AdapterSlots | None
) -> tuple[PromptLogprobs, ...]:
    """Logprobs of the prompt tokens that were asked for; their hidden states follow those of the samples.

    Waits for the device: who wants every prompt token's logprobs reads far more than one token.
    """
    scores, first = [], len(inputs.sample_rows)
    for row in inputs.scored:
        scores.append(_score(model, hidden[first : first + row.count], row, row_tokens, adapters))
        first += row.count
    return tuple(scores)


def _score(
    model: DecoderModel, hidden: Tensor, scored: ScoredRow, row_tokens: Tensor, adapters: AdapterSlots | None
) -> PromptLogprobs:
    following = row_tokens[scored.row, scored.first + 1 : scored.first + 1 + scored.count].to(hidden.device)
    entries = []
    for start in range(0, scored.count, SCORED_PER_PASS):
        states = hidden[start : start + SCORED_PER_PASS]
        lora = adapters.of_head(np.full(len(states), scored.row)) if adapters is not None else None
        logits = model.logits(states, lora)
        if logits.shape[1] < model.config.vocab_size:  # a rank that does not sample has some columns only
            continue
        entries += prompt_logprobs(logits, following[start : start + SCORED_PER_PASS], scored.num_top)
    return PromptLogprobs(scored.row, scored.first + 1, tuple(entries))
