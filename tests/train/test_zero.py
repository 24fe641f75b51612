"""ZeRO on two gloo ranks: losses are those of one rank, and each keeps the bytes that the formulas say."""

import multiprocessing
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.train.finetune import FinetuneJob, prepare
from quire.train.memory import trained_bytes
from quire.train.settings import TrainSettings
from quire.train.zero import end_ranks, start_ranks

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
    found = {"rank": job.rank, "losses": losses, "bytes": kept, "trained": len(trainer.model.parameters.flat)}
    if results is not None:
        results.put(found)
    return found


def on_ranks(job: FinetuneJob, world: int) -> list[dict]:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = replace(job, world=world, address=f"127.0.0.1:{free.getsockname()[1]}")
    processes = [context.Process(target=trained, args=(replace(job, rank=r), results)) for r in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    return sorted((results.get() for _ in processes), key=lambda found: found["rank"])


@pytest.fixture(scope="module")
def alone(tiny: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("alone") / "mine"
    return trained(FinetuneJob(data, folder, str(tiny), settings=SETTINGS, device="cpu"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_and_bytes(stage: int, alone: dict, tiny: Path, data: Path, tmp_path: Path):
    job = FinetuneJob(data, tmp_path / "mine", str(tiny), settings=SETTINGS, device="cpu", zero_stage=stage)
    for found in on_ranks(job, 2):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        expected = trained_bytes(stage, 2, alone["trained"], alone["bytes"]["base"])
        for part, num_bytes in found["bytes"].items():
            assert num_bytes == pytest.approx(expected[part], rel=0.02), part
    assert (tmp_path / "mine" / "adapter_model.safetensors").exists()
