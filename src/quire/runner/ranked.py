"""Steps on several ranks: rank 0 sends every Step to its peers and samples; its tokens are broadcast.

Rank 0 is the engine's own process. A peer runs the Steps that it is sent, in order, and knows no scheduler. With stages
of layers a step is begun and finished in two jobs: the first stage begins others before it has one's hidden states.
"""

import time
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.core.errors import DeviceMemoryFull, EngineDead
from quire.core.step import Step, StepResult
from quire.layers.factory import RankPart
from quire.models.stage import Stage
from quire.observe.logs import get_logger
from quire.parallel.ranks import RankProcesses
from quire.parallel.wire import encode_step
from quire.runner.cpu import CpuOps
from quire.runner.device_ops import ForwardPass
from quire.runner.runner import Runner, _Launched
from quire.runner.step_inputs import StepInputs, TokenInputs, token_inputs
from quire.sampling.records import Sampled, TokenMask

TOKENS = "tokens"  # what broadcasts are counted as
FINISH = b"finish"  # the frame that tells peers to finish the oldest step that was begun
log = get_logger(__name__)


class RankRunner(Runner):
    """A Runner whose forward passes contain collectives; rank 0 chooses the tokens."""

    def __init__(self, part: RankPart, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.part = part

    def encoded(self, step: Step) -> tuple[bytes, ...]:
        """The step for the peers, with the adapters that it copies into blocks."""
        return encode_step(step, self._adapters.packed_loads(step) if self._adapters is not None else ())

    def log_end(self) -> None:
        """Of stages: how full the pipeline was, and how long this one waited for others."""

    def _choose(self, launched: _Launched, logits: Tensor, mask: TokenMask | None) -> Sampled:
        group = self.part.group
        if group.rank == 0:
            sampled = super()._choose(launched, logits, mask)
            group.broadcast(sampled.token_ids.to(torch.int32), TOKENS)
            return sampled
        received = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        token_ids = group.broadcast(received, TOKENS).long()
        sampled = Sampled(token_ids, torch.ones_like(token_ids, dtype=torch.bool))
        self._ops.write_tokens(launched.forward, sampled)
        return sampled


class StageOps(CpuOps):
    """Passes through the layers of one stage. A row may have another sequence before its last token is sampled."""

    def __init__(self, stage: Any, *arguments: Any) -> None:
        super().__init__(stage, *arguments)
        self.stage: Stage = stage
        self._begun: deque[TokenInputs] = deque()
        self._last_starts = np.full(len(self._rows.tokens), -1, np.int64)  # steps, by row

    def change_rows(self, step: Step) -> None:
        super().change_rows(step)
        self._last_starts[[start.row for start in step.starts]] = step.step_id

    def _forward(self, inputs: StepInputs) -> ForwardPass:
        tokens = token_inputs(inputs)
        self.stage.begin(self._assembler.assemble(tokens, tokens.are_all_sampled), self._pool)
        self._begun.append(tokens)
        return ForwardPass(inputs, tokens.sample_positions, None)

    def finish(self, forward: ForwardPass) -> None:
        """Hidden states have been through all stages: logits, and prompts' logprobs."""
        tokens = self._begun.popleft()
        scored = self._scored(tokens, self.stage.finish(len(tokens.wanted)))
        forward.logits, forward.scores = scored.logits, scored.scores

    def write_tokens(self, forward: ForwardPass, sampled: Sampled) -> None:
        rows, step_id = forward.inputs.sample_rows, forward.inputs.step.step_id
        own = self._last_starts[rows] <= step_id
        values = sampled.token_ids.cpu().numpy()[own]
        self._rows.tokens[rows[own], forward.sample_positions[own]] = values


class StageRunner(RankRunner):
    """A RankRunner of a stage. Only the first one finishes steps and samples."""

    _ops: StageOps

    def __init__(self, part: RankPart, *arguments: Any) -> None:
        super().__init__(part, *arguments, StageOps)
        self._begun: deque[Any] = deque()  # steps of the first stage that are not being finished yet
        self._in_flight = [0, 0]  # steps seen at a collect, collects
        self._started = 0.0

    def launch(self, step: Step) -> None:
        self._started = self._started or time.perf_counter()
        super().launch(step)
        if self.part.is_first:
            self._begun.append(self._launched.pop())

    def finish_next(self, mask: TokenMask | None = None) -> None:
        """Of the first stage: finishes the oldest step that was only begun."""
        self._launched.append(self._ops.submit(partial(self._finish, self._begun.popleft(), mask)))

    @torch.inference_mode()
    def _finish(self, submitted: Any, mask: TokenMask | None) -> _Launched:
        self._ops.finish(submitted.result().forward)
        return self._resume(submitted, mask)

    def collect(self) -> StepResult:
        self._in_flight[0] += len(self._launched) + len(self._begun)
        self._in_flight[1] += 1
        return super().collect()

    def log_end(self) -> None:
        steps, collects = self._in_flight
        if collects and self.part.group.rank == 0:
            elapsed = time.perf_counter() - self._started
            full = f"{steps / collects:.2f} steps in flight on average, " if self.part.is_first else ""
            waited, stage = 100 * self._ops.stage.waited / elapsed, self.part.stages.rank
            log.info("pipeline  stage %d: %sbubbles %.0f%% of %.1f s", stage, full, waited, elapsed)


class RankedRunner:
    """Rank 0's StepRunner: sends Steps to the peers and runs them itself."""

    def __init__(self, local: RankRunner, peers: RankProcesses) -> None:
        self._local = local
        self._peers = peers
        self._stage = local if isinstance(local, StageRunner) else None
        self._num_masked = 0  # steps whose mask finished them
        self.traffic = local.part.group.traffic

    def launch(self, step: Step) -> None:
        self._peers.check()
        self._peers.send(*self._local.encoded(step))
        try:
            self._local.launch(step)
        except DeviceMemoryFull as full:  # the peers go on with a step that this rank gave up
            raise EngineDead(f"rank 0: {full}") from full

    def mask(self, mask: TokenMask) -> None:
        if self._stage is None:
            self._local.mask(mask)
        else:
            self._num_masked += 1
            self._peers.send(FINISH)
            self._stage.finish_next(mask)

    def collect(self) -> StepResult:
        if self._num_masked:
            self._num_masked -= 1
        elif self._stage is not None:
            self._peers.send(FINISH)
            self._stage.finish_next()
        try:
            return self._local.collect()
        finally:
            self._peers.check()  # without a rank, the result or the error means nothing

    def close(self) -> None:
        try:
            self._local.log_end()
            self._local.close()  # while the peers live: a kernel of an open step waits for them
        finally:
            self._peers.close()
            self._local.part.close()
