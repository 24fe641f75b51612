"""ZeRO on two gloo ranks: losses are those of one rank, and each keeps the bytes that the formulas say."""

import json
import multiprocessing
import os
import signal
import socket
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from quire.core.errors import ConfigError, TrainingError
from quire.train.finetune import FinetuneJob, finetune_ranks, prepare
from quire.train.settings import FINISHED, STOPPED, TrainSettings
from quire.train.zero import end_ranks, lora_training, start_ranks

SETTINGS = TrainSettings(
    rank=4, epochs=1, batch_size=5, batch_tokens=40, learning_rate=0.01, checkpoint_steps=2
)
CPU = torch.device("cpu")


def trained(job: FinetuneJob, results: "multiprocessing.SimpleQueue | None" = None) -> dict:
    """One rank's run: losses, and the bytes it keeps between steps."""
    torch.set_num_threads(1)
    if job.world > 1:
        start_ranks(job.rank, job.world, job.address, CPU)
    trainer = prepare(job, CPU)
    losses: list[float] = []
    trainer.run(lambda report: losses.append(report.loss))
    trainer.shards.release()
    kept = {
        **trainer.shards.num_bytes,
        "optimizer": trainer.optimizer.num_bytes,
        "base": trainer.model.base_bytes,
    }
    end_ranks()
    found = {
        "stage": job.zero_stage,
        "rank": job.rank,
        "losses": losses,
        "bytes": kept,
        "trained": len(trainer.model.parameters.flat),
    }
    if results is not None:
        results.put(found)
    return found


def trained_each(jobs: "list[FinetuneJob]", results: "multiprocessing.SimpleQueue") -> None:
    for job in jobs:
        trained(job, results)


def on_ranks(jobs: "list[FinetuneJob]", world: int) -> list[dict]:
    """All jobs one after another, in the same processes: starting one takes longer than a run."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    for at, job in enumerate(jobs):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            jobs[at] = replace(job, world=world, address=f"127.0.0.1:{free.getsockname()[1]}")
    by_rank = [[replace(job, rank=rank) for job in jobs] for rank in range(world)]
    processes = [context.Process(target=trained_each, args=(one, results)) for one in by_rank]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    return [results.get() for _ in range(world * len(jobs))]


@pytest.fixture(scope="module")
def alone(tiny: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("alone") / "mine"
    return trained(FinetuneJob(data, folder, str(tiny), settings=SETTINGS, device="cpu"))


def test_losses_and_bytes(alone: dict, tiny: Path, data: Path, tmp_path: Path):
    jobs = [
        FinetuneJob(data, tmp_path / str(stage), str(tiny), settings=SETTINGS, device="cpu", zero_stage=stage)
        for stage in (1, 2, 3)
    ]
    results = on_ranks(jobs, 2)
    assert sorted((found["stage"], found["rank"]) for found in results) == list(product((1, 2, 3), (0, 1)))
    for found in results:
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        kept = lora_training(0, alone["trained"], 2)[found["stage"]]
        base = lora_training(alone["bytes"]["base"], 0, 2)[found["stage"]].parameters
        for part, num_bytes in found["bytes"].items():
            expected = base if part == "base" else getattr(kept, part)
            assert num_bytes == pytest.approx(expected, rel=0.02), part
        assert (tmp_path / str(found["stage"]) / "adapter_model.safetensors").exists()


def test_ranks_stop_after_the_same_step_and_go_on(alone: dict, tiny: Path, data: Path, tmp_path: Path):
    """Signals reach rank 0 alone, which tells the others and names an error of theirs; a finished adapter is written
    over when asked."""
    job = FinetuneJob(
        data, tmp_path, str(tiny), settings=SETTINGS, device="cpu", zero_stage=2, world=2, overwrite=True
    )
    (tmp_path / "adapter_model.safetensors").touch()
    losses: list[float] = []

    def on_step(report) -> None:
        losses.append(report.loss)
        for other in multiprocessing.active_children():  # as ctrl-C in a terminal does
            os.kill(other.pid, signal.SIGINT)
            os.kill(other.pid, signal.SIGTERM)

    result = finetune_ranks(job, on_step, lambda _: None, lambda: len(losses) == 3)
    assert result == STOPPED
    state = json.loads((tmp_path / "training" / "checkpoints" / "step-000003" / "trainer.json").read_text())
    assert (state["step"], state["world"]) == (3, 2)
    states = tmp_path / "training" / "checkpoints" / "step-000003" / "optimizer-1.safetensors"
    whole = states.read_bytes()
    states.write_bytes(b"x")
    with pytest.raises(TrainingError, match=r"rank 1 of 2: .*optimizer-1\.safetensors cannot be read"):
        finetune_ranks(replace(job, overwrite=False), on_step, lambda _: None)
    states.write_bytes(whole)
    assert finetune_ranks(replace(job, overwrite=False), on_step, lambda _: None) == FINISHED
    assert losses == pytest.approx(alone["losses"], rel=1e-5)
    with pytest.raises(ConfigError, match="holds a finished adapter"):
        finetune_ranks(replace(job, overwrite=False), on_step, lambda _: None)


def test_a_rank_that_is_killed_is_named(tiny: Path, data: Path, tmp_path: Path):
    job = FinetuneJob(data, tmp_path / "mine", str(tiny), settings=SETTINGS, device="cpu", world=2)

    def on_step(report) -> None:
        for other in multiprocessing.active_children():
            other.kill()

    with pytest.raises(TrainingError, match="rank 1 of 2 ended with exit code -9: run again"):
        finetune_ranks(job, on_step, lambda _: None)
