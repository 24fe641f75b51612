"""The runner of a model: its limits, and its warm-up."""

from dataclasses import dataclass

import torch

from quire.core.config import SchedulerConfig
from quire.engine.build.resolve import BuildPlan, Precision
from quire.layers.attention import Pool
from quire.layers.factory import RankPart
from quire.models.encoder_decoder import EncoderDecoder
from quire.models.model import DecoderModel
from quire.models.offload import is_streamed
from quire.parallel.processes import TorchGroup
from quire.runner.adapters import AdapterSlots
from quire.runner.cross import CrossCpuOps
from quire.runner.cross_cuda import CrossCudaOps
from quire.runner.device_ops import RunnerLimits
from quire.runner.drafts import Proposals
from quire.runner.ranked import RankRunner, StageRunner
from quire.runner.runner import Runner
from quire.runner.transfer import TransferEngine

GRAPH_SECONDS = 15.0  # of capturing at start; a third of that is usual, more if kernels are compiled too


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    runner: Runner
    num_graphs: int  # sizes of steps that were captured


def build_runner(
    model: DecoderModel,
    pool: Pool,
    limits: RunnerLimits,
    device: torch.device,
    proposals: Proposals | None = None,
    adapters: AdapterSlots | None = None,
    transfers: TransferEngine | None = None,
    part: RankPart | None = None,
) -> BuiltRunner:
    """`part`: of a model that several ranks compute."""
    parts = (model, pool, limits, device, proposals, adapters, transfers)
    if part is not None:
        runner: Runner = (RankRunner if part.layers is None else StageRunner)(part, *parts)
    elif isinstance(model, EncoderDecoder):
        runner = Runner(*parts, CrossCudaOps if device.type == "cuda" else CrossCpuOps)  # type: ignore[arg-type]
    else:
        runner = Runner(*parts)
    return BuiltRunner(runner, runner.warm_up(GRAPH_SECONDS))


def runner_limits(
    plan: BuildPlan, scheduler: SchedulerConfig, model: DecoderModel, precision: Precision
) -> RunnerLimits:
    max_num_seqs, max_tokens = scheduler.limits
    # a tape needs native operations throughout; a CUDA graph takes all that a model launches
    native = model.recordable and not (plan.part is not None and isinstance(plan.part.group, TorchGroup))
    recordable = (native or precision.device.type == "cuda") and not is_streamed(model)
    return RunnerLimits(
        max_num_seqs,
        max_tokens,
        plan.max_model_len,
        record_decodes=recordable and not plan.config.runner.enforce_eager,
        activation_dtype=precision.format.activation_dtype,
        deterministic=plan.config.runner.deterministic,
    )
