"""Trainer: the loop of steps. What it computes depends on settings, data and seed alone, across interruptions too."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.adapters.peft import WEIGHTS
from quire.core.config import ADAPTER_CONFIG_FILE
from quire.core.errors import ConfigError, TrainingError
from quire.train.examples import Item, packed
from quire.train.model import TrainedModel
from quire.train.optimizer import adamw, rate_at
from quire.train.run_files import PART, RunFiles, write_json
from quire.train.settings import BITS, DPO, FINISHED, STOPPED, TrainSettings
from quire.train.zero import StateShards

MAX_VALIDATION = 256  # items whose loss is computed
OPTIMIZER = "optimizer"  # begins the names of files with its states


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One step's metrics; a line of the log."""

    step: int  # from 1
    num_steps: int
    loss: float  # mean over trained tokens; DPO: over pairs
    learning_rate: float
    grad_norm: float
    num_tokens: int
    seconds: float
    validation_loss: float | None = None
    accuracy: float | None = None  # DPO: pairs whose preferred answer is the likelier one


OnStep = Callable[[TrainedStep], None]


class Trainer:
    """`settings` are resolved. The run's files are in `folder`/training; one that was interrupted goes on."""

    def __init__(
        self,
        model: TrainedModel,
        settings: TrainSettings,
        items: Sequence[Item],
        validation: Sequence[Item],
        folder: Path,
        adapter_config: dict[str, Any],
        zero_stage: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.model, self._settings = model, settings
        self._items, self._validation = items, validation[:MAX_VALIDATION]
        self._config = adapter_config
        self.folder = folder
        self.shards = StateShards(model.parameters, zero_stage, rank, world)
        count = self.shards.last - self.shards.first
        bits = BITS[settings.optimizer]
        assert settings.batch_size is not None and settings.epochs is not None  # noqa: PT018
        self._per_epoch = -(-len(items) // settings.batch_size)
        self.num_steps = self._per_epoch * settings.epochs
        self.step = 0
        self.files = RunFiles(folder, settings.keep_checkpoints)
        self.checkpoints, self.log = self.files.checkpoints, self.files.log
        self._identity = _identity(settings, items, adapter_config)
        newest = self.checkpoints.newest()
        own = newest is not None and newest[1].get("library") == ""  # goes on with its own states
        self.optimizer = adamw(count, model.device, bits, settings.weight_decay, settings.paged, own)

    # ------------------------------------------------------------------ the loop

    def run(self, on_step: OnStep = lambda _: None, stop: Callable[[], bool] = lambda: False) -> str:
        """FINISHED, or STOPPED with a checkpoint of the last step. TrainingError leaves the last good one."""
        self._resume()
        every = self._settings.checkpoint_steps or 1
        while self.step < self.num_steps:
            if self.shards.on_any(stop()):  # all ranks stop after the same step
                self._save()
                return STOPPED
            report = self._one_step()
            if self.shards.rank == 0:
                self._log({"type": "metrics", **asdict(report)})
            on_step(report)
            if self.step % every == 0 or self.step == self.num_steps:
                self._save()
        self.shards.gather()
        if self.shards.rank == 0:
            with self.checkpoints.writing("the adapter", self.folder):
                save_adapter(self.folder, self.model.parameters.tensors(), self._config)
        self.shards.barrier()
        return FINISHED

    def _one_step(self) -> TrainedStep:
        started, settings = time.monotonic(), self._settings
        items = self._step_items(self.step)
        torch.manual_seed(settings.seed * 1_000_003 + self.step)  # of dropout: a resumed step draws the same
        weight = len(items) if settings.method == DPO else sum(e.num_trained for item in items for e in item)
        self.shards.gather()
        self.model.parameters.training = True
        loss, right = self._backward(items, weight)
        self.model.parameters.training = False
        norm = self.shards.reduce()
        value = float(self.shards.total(loss))
        self._check(value, norm)
        if settings.clip and norm > settings.clip:
            self.shards.grads.mul_(settings.clip / norm)
        rate = self._rate()
        self.optimizer.step(self.shards.parameters, self.shards.grads, rate)
        self.shards.update()
        self.step += 1
        validation = None
        if self._validation and (self.step % self._per_epoch == 0 or self.step == self.num_steps):
            validation = self.validate()
        self.shards.release()
        return TrainedStep(
            step=self.step,
            num_steps=self.num_steps,
            loss=value,
            learning_rate=rate,
            grad_norm=norm,
            num_tokens=sum(len(e.token_ids) for item in items for e in item),
            seconds=time.monotonic() - started,
            validation_loss=validation,
            accuracy=float(self.shards.total(right)) / len(items) if settings.method == DPO else None,
        )

    def _backward(self, items: Sequence[Item], weight: int) -> tuple[Tensor, Tensor]:
        """Gradients of this rank's batches; their share of the mean loss, and of the pairs ranked right."""
        batches = packed(items, self._settings.batch_tokens or 1)
        rank, world = self.shards.rank, self.shards.world
        total, right = torch.zeros(2, device=self.model.device)
        for at in range(rank, -(-len(batches) // world) * world, world):
            # a rank without a batch of its own computes the first with weight 0: collectives need every rank
            loss, good = self._loss(batches[at] if at < len(batches) else batches[0])
            share = 1.0 / weight if at < len(batches) else 0.0
            (loss * share).backward()
            total += loss.detach() * share
            right += good * (share > 0)
        return total, right

    def _loss(self, batch: Sequence[Item]) -> tuple[Tensor, Tensor]:
        """The sum over the batch, and for DPO how many pairs are ranked right."""
        examples = [example for item in batch for example in item]
        if self._settings.method != DPO:
            return self.model.loss(examples), torch.zeros((), device=self.model.device)
        with torch.no_grad():
            base = -self.model.losses(examples, adapted=False)
        gain = (-self.model.losses(examples) - base).view(-1, 2)  # log-likelihood over the base's
        margin = gain[:, 0] - gain[:, 1]
        return -F.logsigmoid(self._settings.beta * margin).sum(), (margin.detach() > 0).sum()

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss of the held-out items."""
        total = torch.zeros((), device=self.model.device)
        for batch in packed(self._validation, self._settings.batch_tokens or 1):
            total += self._loss(batch)[0]
        is_dpo = self._settings.method == DPO
        count = sum(1 if is_dpo else sum(e.num_trained for e in item) for item in self._validation)
        return float(total) / count

    def _step_items(self, step: int) -> list[Item]:
        epoch, at = divmod(step, self._per_epoch)
        generator = torch.Generator().manual_seed(self._settings.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self._items), generator=generator).tolist()
        size = self._settings.batch_size or 1
        return [self._items[index] for index in order[at * size : (at + 1) * size]]

    def _rate(self) -> float:
        settings = self._settings
        warmup = math.ceil(settings.warmup * self.num_steps)
        return rate_at(self.step, self.num_steps, warmup, settings.learning_rate or 0.0, settings.schedule)

    def _check(self, loss: float, norm: float) -> None:
        """Before the parameters change."""
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainingError(
                f"the loss is {loss:g} and its gradient's norm {norm:g} in step {self.step + 1} of {self.num_steps}: "
                f"lower --learning-rate, which is {self._settings.learning_rate:g}, or --clip; "
                f"{self.checkpoints.last_good()}"
            )

    # ------------------------------------------------------------------ files

    def _save(self) -> None:
        self.shards.gather()
        rank, folder = self.shards.rank, self.checkpoints.path(self.step)
        optimizer = {name: part.cpu().contiguous() for name, part in self.optimizer.state().items()}
        parts = self.checkpoints.folder / f"{OPTIMIZER}-{rank}.safetensors"  # collected by rank 0
        if rank:
            with self.checkpoints.writing("the optimizer's states", parts):
                parts.parent.mkdir(parents=True, exist_ok=True)
                save_file(optimizer, parts)
        self.shards.barrier()

        def write(beside: Path) -> None:
            save_adapter(beside, self.model.parameters.tensors(), self._config)
            save_file(optimizer, beside / parts.name)
            for other in range(1, self.shards.world):
                name = f"{OPTIMIZER}-{other}.safetensors"
                (self.checkpoints.folder / name).rename(beside / name)

        if rank == 0 and not (folder / WEIGHTS).exists():
            state = {"step": self.step, "identity": self._identity, "world": self.shards.world}
            state["library"] = self.optimizer.library
            self.checkpoints.save(self.step, write, state)
            self._log({"type": "checkpoint", "step": self.step})
        self.shards.barrier()
        self.shards.release()

    def _resume(self) -> None:
        newest = self.checkpoints.newest()
        if newest is not None:
            path, state = newest
            if state["identity"] != self._identity or state["world"] != self.shards.world:
                raise ConfigError(
                    f"{self.folder} holds a run with other settings or data: give another --output, or --overwrite"
                )
            device = self.model.device
            self.shards.gather()
            saved = load_tensors(path / WEIGHTS, device)
            with torch.no_grad():
                for name, tensor in self.model.parameters.tensors().items():
                    tensor.copy_(saved[name])
            self.shards.release()
            states = load_tensors(path / f"{OPTIMIZER}-{self.shards.rank}.safetensors", device)
            self.step = state["step"]
            self.optimizer.load(states, self.step)
        if self.shards.rank == 0:
            with self.checkpoints.writing("the log", self.files.folder):
                self.log.rewind(self.step)

    def _log(self, event: Mapping[str, Any]) -> None:
        with self.checkpoints.writing("the log", self.files.folder):
            self.log.add({"created_at": int(time.time()), **event})


def save_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """A folder that PEFT and `--lora-modules` load. The weights appear last, and whole."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / ADAPTER_CONFIG_FILE, config)
    beside = folder / f"{WEIGHTS}{PART}"
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, beside)
    beside.replace(folder / WEIGHTS)


def load_tensors(path: Path, device: torch.device) -> dict[str, Tensor]:
    try:
        return load_file(path, device=str(device))
    except Exception as error:
        raise TrainingError(
            f"{path} cannot be read ({error}): delete its folder, and an earlier one serves"
        ) from error


def _identity(settings: TrainSettings, items: Sequence[Item], config: dict[str, Any]) -> str:
    """Of everything that the losses depend on; where files lie and how many checkpoints are kept is not."""
    kept = {
        k: v
        for k, v in asdict(settings).items()
        if k not in ("checkpoint_steps", "keep_checkpoints", "paged")
    }
    digest = hashlib.sha256(json.dumps([kept, config], sort_keys=True).encode())
    for item in items:
        for example in item:
            digest.update(repr((example.token_ids, example.labels)).encode())
    return digest.hexdigest()
