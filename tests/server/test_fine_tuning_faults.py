"""Jobs of fine-tuning in trouble: an engine that is down, a full disk, a late pause, a name of another key."""

import asyncio
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.core.errors import InvalidRequest
from quire.server.fine_tuning import endpoints
from quire.server.fine_tuning import jobs as fine_tuning
from quire.server.fine_tuning.endpoints import TuningEndpoints
from quire.server.fine_tuning.jobs import QUEUED, RUNNING, Job, Jobs
from quire.server.protocol.fine_tuning import NewFineTuningJob
from quire.server.settings import ServerSettings
from tests.server.test_fine_tuning import BASE, lines, new_job


def trained(tmp_path: Path, register, **changes: object) -> tuple[Jobs, Job]:
    """A job whose process has ended with an adapter."""
    jobs, job = Jobs(tmp_path, 1, register), new_job(pid=2**30, pid_started="1", **changes)
    jobs.folder(job).mkdir()
    jobs._jobs[job.id] = job
    jobs.files(job).ended("finished")
    return jobs, job


def test_a_job_that_linux_killed_waits_for_the_memory_that_it_held(tmp_path, monkeypatch):
    free, started = [0], []
    monkeypatch.setattr(fine_tuning, "memory_left", lambda: (free[0], 16 * 10**9))
    monkeypatch.setattr(fine_tuning, "numbers_in", lambda _path: {"RssAnon": 2 << 20})  # KiB
    states = [None, -signal.SIGKILL, -signal.SIGKILL]
    killed = SimpleNamespace(pid=os.getpid(), poll=lambda: states.pop(0))
    monkeypatch.setattr(fine_tuning.subprocess, "Popen", lambda *_, **__: started.append(1) or killed)
    jobs, job = Jobs(tmp_path, 1, None), new_job()
    jobs.folder(job).mkdir()
    jobs._jobs[job.id] = job
    for _ in range(4):  # started, alive, killed, waits
        asyncio.run(jobs._look())
    assert (len(started), job.memory) == (1, 2 << 30)
    assert jobs.events(job)[-1]["message"].endswith("from the last checkpoint when 2.1 GB are free")
    free[0] = 2 << 30
    asyncio.run(jobs._look())
    assert len(started) == 2


def test_an_adapter_is_registered_when_an_engine_that_is_down_is_back(tmp_path, monkeypatch):
    states = ["down", "down", "ready"]
    loaded = []

    class Client:
        status = "the engine is being restarted"
        is_ready = property(lambda self: states.pop(0) == "ready")

        async def load_adapter(self, name, path):
            loaded.append(name)

    lora = SimpleNamespace(adapters=SimpleNamespace(lora_dir=str(tmp_path / "adapters")))
    service = SimpleNamespace(settings=ServerSettings(), client=Client(), models=SimpleNamespace(config=lora))
    (tmp_path / "fine_tuning").mkdir()
    register = TuningEndpoints(service, SimpleNamespace(folder=tmp_path))._register
    jobs, job = trained(tmp_path / "fine_tuning", register, status=RUNNING)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (jobs.adapter_folder(job) / name).write_text("{}")
    monkeypatch.setattr(jobs, "_start", lambda _: pytest.fail("a finished job is not started again"))
    asyncio.run(jobs._look())
    assert (job.status, loaded) == (RUNNING, [])
    asyncio.run(jobs._look())
    assert (job.status, loaded) == ("succeeded", [job.adapter])
    assert (tmp_path / "adapters" / job.adapter / "adapter_model.safetensors").exists()


def test_a_fault_of_one_job_does_not_end_the_watcher_and_is_logged_once(tmp_path, monkeypatch, caplog):
    faults = [ZeroDivisionError("by zero")] * 3

    async def register(name: str, folder: Path) -> None:
        if faults:
            raise faults.pop()

    jobs, job = trained(tmp_path, register, status=RUNNING)
    monkeypatch.setattr(fine_tuning, "POLL_SECONDS", 0)
    asyncio.run(jobs._watching())
    assert job.status == "succeeded"
    assert len(caplog.records) == 1
    assert "cannot go on now (by zero)" in caplog.text


def test_a_job_that_a_full_disk_keeps_from_starting_has_not_started(tmp_path, monkeypatch, caplog):
    jobs, job = Jobs(tmp_path, 1, None), new_job()
    jobs._jobs[job.id] = job
    jobs.folder(job).mkdir()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fine_tuning.subprocess, "Popen", full)
    for _ in range(5):
        assert asyncio.run(jobs._look())
    assert (job.status, job.num_starts) == (QUEUED, 0)
    assert len(caplog.records) == 1


def test_a_job_does_not_take_the_flags_of_the_servers_environment(tmp_path, monkeypatch):
    given = {"QUIRE_NUM_THREADS": "8", "QUIRE_API_KEY": "secret", "QUIRE_CACHE": "/cache", "HF_HOME": "/hub"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    started = []

    def popen(*_: object, env: dict[str, str], **__: object) -> SimpleNamespace:
        started.append({name: env.get(name) for name in given})
        return SimpleNamespace(pid=os.getpid())

    monkeypatch.setattr(fine_tuning.subprocess, "Popen", popen)
    jobs, job = Jobs(tmp_path, 1, None), new_job()
    jobs.folder(job).mkdir()
    jobs._start(job)
    assert started == [
        {"QUIRE_NUM_THREADS": None, "QUIRE_API_KEY": None, "QUIRE_CACHE": "/cache", "HF_HOME": "/hub"}
    ]


def test_what_could_not_be_served_is_refused_before_it_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoints, "owner_of", lambda request: request.owner)
    adapters = SimpleNamespace(lora_dir=str(tmp_path), max_lora_rank=8)
    config = SimpleNamespace(adapters=adapters, model=SimpleNamespace(model=None))
    service = SimpleNamespace(
        settings=ServerSettings(), models=SimpleNamespace(config=config), adapter_named=lambda _: None,
        model_named=lambda _: SimpleNamespace(names=(BASE,)),
    )  # fmt: skip
    (tmp_path / "data.jsonl").write_bytes(lines())
    tuning = TuningEndpoints(service, SimpleNamespace(folder=tmp_path))
    monkeypatch.setattr(tuning.jobs, "_watch", lambda: None)

    async def path_of(*_: str) -> Path:
        return tmp_path / "data.jsonl"

    monkeypatch.setattr(tuning, "_path_of", path_of)

    def create(owner: str, rank: int | None) -> None:
        body = NewFineTuningJob(
            model=BASE, training_file="file-1", suffix="mine", hyperparameters=rank and {"lora_rank": rank}
        )
        asyncio.run(tuning.create_job(body, SimpleNamespace(owner=owner)))

    for rank, shown in ((9, 9), (None, 16)):
        with pytest.raises(
            InvalidRequest, match=f"rank={shown} cannot be served: give at most 8, or raise --max"
        ):
            create("a", rank)
    create("a", 8)
    create("a", 8)
    with pytest.raises(InvalidRequest, match="the name ft:tiny:mine is taken: choose another suffix"):
        create("b", 8)
    for job in tuning.jobs.all_of("a"):
        tuning.jobs.change(job, "cancelled")
    create("b", 8)


def test_a_failed_job_with_a_checkpoint_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoints, "owner_of", lambda _request: "")
    service = SimpleNamespace(settings=ServerSettings())
    tuning = TuningEndpoints(service, SimpleNamespace(folder=tmp_path))
    jobs, job = tuning.jobs, new_job(status="failed", error="the disk is full", finished_at=1)
    jobs.folder(job).mkdir(parents=True)
    jobs._jobs[job.id] = job
    started = []
    monkeypatch.setattr(jobs, "_watch", lambda: None)
    monkeypatch.setattr(jobs, "_start", started.append)
    with pytest.raises(InvalidRequest, match="failed without a checkpoint: create it again"):
        asyncio.run(tuning.resume_job(job.id, None))
    jobs.files(job).checkpoints.save(3, lambda _: None, {})
    jobs.files(job).ended("failed", "the disk is full")
    shown = json.loads(asyncio.run(tuning.resume_job(job.id, None)).body)
    assert (shown["status"], shown["error"], shown["finished_at"]) == (QUEUED, None, None)
    asyncio.run(jobs._look())
    assert started == [job]


@pytest.mark.parametrize("status", ["paused", QUEUED])
def test_a_job_that_is_paused_during_its_last_step_succeeds(status, tmp_path):
    """SIGTERM came too late; QUEUED: the job is resumed before its process has ended."""
    registered = []

    async def register(name: str, folder: Path) -> None:
        registered.append(name)

    jobs, job = trained(tmp_path, register, status=status)
    asyncio.run(jobs._look())
    assert (job.status, registered, job.pid) == ("succeeded", [job.adapter], None)


def test_a_job_that_is_cancelled_while_it_is_registered_stays_cancelled(tmp_path, monkeypatch):
    async def register(name: str, folder: Path) -> None:
        jobs.change(job, "cancelled")

    jobs, job = trained(tmp_path, register, status=RUNNING)
    monkeypatch.setattr(jobs, "_watch", lambda: None)
    asyncio.run(jobs._look())
    assert job.status == "cancelled"
    assert [event["message"] for event in jobs.events(job)] == ["Cancelled job: ftjob-1"]
