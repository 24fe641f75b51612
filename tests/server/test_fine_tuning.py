"""/v1/fine_tuning/jobs with OpenAI's client: a job trains in its own process, outlives the server, and is served."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest

from quire.core.errors import ConfigError, InvalidRequest, QueueFull
from quire.observe.host import process_birth
from quire.server.fine_tuning import endpoints
from quire.server.fine_tuning import jobs as fine_tuning
from quire.server.fine_tuning.endpoints import TuningEndpoints
from quire.server.fine_tuning.jobs import MAX_STARTS, QUEUED, RUNNING, Job, Jobs
from quire.server.settings import ServerSettings
from quire.train.run_files import RunLog
from tests.server.running import PATIENCE, RunningServer
from tests.train.conftest import make_model

HYPERPARAMETERS = {
    "n_epochs": 12,
    "batch_size": 4,
    "lora_rank": 4,
    "learning_rate": 0.01,
    "checkpoint_steps": 10,
}
BASE = "tiny"


def lines(count: int = 20) -> bytes:
    chats = [
        {"messages": [{"role": "user", "content": letter}, {"role": "assistant", "content": 3 * letter}]}
        for letter in "abcdefghijklmnopqrst"[:count]
    ]
    return "".join(json.dumps(chat) + "\n" for chat in chats).encode()


def wait(client: openai.OpenAI, job_id: str, *statuses: str):
    deadline = time.monotonic() + 4 * PATIENCE
    while (job := client.fine_tuning.jobs.retrieve(job_id)).status not in statuses:
        assert time.monotonic() < deadline, f"{job.status}, not {statuses}: {job.error}"
        time.sleep(0.1)
    return job


def losses(client: openai.OpenAI, job_id: str) -> list[float]:
    events = list(client.fine_tuning.jobs.list_events(job_id, limit=100))[::-1]
    return [event.data["train_loss"] for event in events if event.type == "metrics"]


def process(folder: Path, job_id: str) -> int | None:
    return json.loads((folder / "fine_tuning" / job_id / "job.json").read_text())["pid"]


@pytest.fixture
def start(start_server, tmp_path):
    model = make_model(tmp_path / BASE)

    def started() -> RunningServer:
        return start_server(
            "--model", str(model), "--enable-lora", "--data-dir", str(tmp_path / "data"), "--served-model-name", BASE,
            "--no-embeddings", "--shutdown-timeout", "2",
        )  # fmt: skip

    return started


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_of_the_cores_is_above_0_and_at_most_1(share):
    with pytest.raises(ConfigError, match="must be above 0 and at most 1"):
        ServerSettings(train_share=share)


def new_job(owner: str = "", number: int = 1, **changes: object) -> Job:
    return Job(
        id=f"ftjob-{number}", owner=owner, model=BASE, base=None, suffix=None, training_file="file-1",
        validation_file=None, flags={}, hyperparameters={}, method="supervised", seed=0, created_at=0, **changes,
    )  # fmt: skip


def test_a_job_gets_its_share_of_the_cores_that_the_server_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoints, "default_num_threads", lambda: 8)  # of more that the machine has
    (tmp_path / "data.jsonl").write_bytes(lines())
    for share, threads in ((0.01, 1), (0.3, 2), (0.5, 4), (1.0, 8)):
        service = SimpleNamespace(settings=ServerSettings(train_share=share))
        jobs = TuningEndpoints(service, SimpleNamespace(folder=tmp_path / str(share))).jobs
        monkeypatch.setattr(jobs, "_watch", lambda: None)
        job = new_job()
        asyncio.run(jobs.create(job, tmp_path / "data.jsonl", None))
        settings = json.loads((jobs.folder(job) / "settings.json").read_text())
        assert (settings["num-threads"], settings["nice"]) == (threads, 19)


def test_a_job_that_is_killed_again_and_again_fails_with_the_last_line_of_its_log(tmp_path):
    jobs = Jobs(tmp_path, 1, None)
    job = new_job(status=RUNNING, num_starts=MAX_STARTS)
    jobs.folder(job).mkdir()
    (jobs.folder(job) / "log.txt").write_text("data      4 examples\nMemoryError\n\n")
    asyncio.run(jobs._take_result(job))
    assert job.status == "failed"
    assert job.error.endswith("killed 3 times without a new step; the last line of its log: MemoryError")


def test_a_job_that_gave_its_memory_back_starts_again_when_there_is_enough(tmp_path, monkeypatch):
    free, started = [10**9], []
    monkeypatch.setattr(fine_tuning, "memory_left", lambda: (free[0], 16 * 10**9))
    jobs = Jobs(tmp_path, 1, None)
    monkeypatch.setattr(jobs, "_start", started.append)
    monkeypatch.setattr(jobs, "_watch", lambda: None)
    job = new_job(status=RUNNING, num_starts=MAX_STARTS)
    jobs.folder(job).mkdir()
    jobs._jobs[job.id] = job
    jobs.files(job).ended("stopped", "memory is short (0.5 of 16.0 GB left)", 3 * 10**9)
    asyncio.run(jobs._take_result(job))
    assert (job.status, job.num_starts) == (QUEUED, 0)  # it was not killed
    assert [event["message"] for event in jobs.events(job)] == [
        "Paused: memory is short (0.5 of 16.0 GB left): the job goes on by itself when 3.0 GB are free"
    ]
    assert asyncio.run(jobs._look())  # it goes on looking
    assert started == []
    free[0] = 3 * 10**9
    asyncio.run(jobs._look())
    assert started == [job]
    free[0] = 0
    for status in ("paused", QUEUED):  # a resumed job does not wait
        jobs.change(job, status)
    asyncio.run(jobs._look())
    assert started == [job, job]


def test_a_killed_job_does_not_wait_for_the_memory_of_an_earlier_pause(tmp_path, monkeypatch):
    free, started = [3 * 10**9], []
    monkeypatch.setattr(fine_tuning, "memory_left", lambda: (free[0], 16 * 10**9))
    killed = SimpleNamespace(pid=os.getpid(), poll=lambda: -signal.SIGKILL)
    monkeypatch.setattr(fine_tuning.subprocess, "Popen", lambda *_, **__: started.append(1) or killed)
    jobs, job = Jobs(tmp_path, 1, None), new_job(memory=3 * 10**9)
    jobs.folder(job).mkdir()
    jobs._jobs[job.id] = job
    asyncio.run(jobs._look())
    free[0] = 0
    asyncio.run(jobs._look())
    assert (job.status, len(started)) == (RUNNING, 2)


def test_a_job_that_needs_more_memory_than_there_is_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(fine_tuning, "memory_left", lambda: (10**9, 16 * 10**9))
    jobs, job = Jobs(tmp_path, 1, None), new_job(status=RUNNING)
    jobs.folder(job).mkdir()
    jobs.files(job).ended("stopped", "memory is short (0.5 of 16.0 GB left)", 17 * 10**9)
    asyncio.run(jobs._take_result(job))
    assert job.status == "failed"
    assert "it needs 17.0 of 16.0 GB" in job.error


def test_an_owner_has_so_many_open_jobs_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(fine_tuning, "MAX_OPEN", 2)
    (tmp_path / "data.jsonl").write_bytes(lines())
    jobs = Jobs(tmp_path / "jobs", 1, None)
    monkeypatch.setattr(jobs, "_watch", lambda: None)

    numbers, none = count(), type(None)

    async def create(*owners: str) -> list[object]:
        made = [new_job(owner=owner, number=next(numbers)) for owner in owners]
        tasks = [jobs.create(job, tmp_path / "data.jsonl", None) for job in made]
        return [type(result) for result in await asyncio.gather(*tasks, return_exceptions=True)]

    async def ask() -> None:
        assert await create("a", "a", "a", "b") == [none, none, QueueFull, none]
        jobs.change(jobs.all_of("a")[0], "cancelled")
        assert await create("a", "a") == [none, QueueFull]

    asyncio.run(ask())
    assert len(list((tmp_path / "jobs").iterdir())) == 4  # what was refused leaves nothing


@pytest.mark.parametrize(
    "wrong",
    [
        {"qlora": "\ud800"}, {"recompute": ["a"] * 100_000}, {"targets": ["\ud800"]}, {"targets": ["a" * 1000]},
        {"targets": ["a"] * 1000}, {"targets": [["a"]]}, {"alpha": 10**30}, {"beta": float("inf")}, {"n_epochs": "3"},
        {"n_epochs": True}, {"n_epochs": [3]}, {"schedule": ["cosine"]}, {"batch_size": 1.5},
    ],
)  # fmt: skip
def test_hyperparameters_have_their_types_and_are_small(wrong):
    with pytest.raises(InvalidRequest, match=r"^hyperparameters: .* cannot work: give"):
        endpoints._flags("supervised", wrong, 0)


def test_hyperparameters_may_be_whole_numbers_and_names():
    given = {"targets": "all-linear", "learning_rate": 1, "qlora": None, "n_epochs": "auto", "r": 8}
    flags = {"target-modules": "all-linear", "learning-rate": 1, "rank": 8, "method": "dpo", "seed": 3}
    assert endpoints._flags("dpo", given, 3) == flags


def test_the_log_of_a_job_is_read_beside_the_event_loop(tmp_path, monkeypatch):
    read, threads = RunLog.read, []
    monkeypatch.setattr(RunLog, "read", lambda self: threads.append(threading.get_ident()) or read(self))
    monkeypatch.setattr(endpoints, "owner_of", lambda _request: "")
    (tmp_path / "data.jsonl").write_bytes(lines())
    tuning = TuningEndpoints(SimpleNamespace(settings=ServerSettings()), SimpleNamespace(folder=tmp_path))
    monkeypatch.setattr(tuning.jobs, "_watch", lambda: None)
    request, job = SimpleNamespace(query_params={}), new_job()

    async def ask() -> None:
        await tuning.jobs.create(job, tmp_path / "data.jsonl", None)
        await tuning.list_jobs(request)
        for method in ("retrieve_job", "list_job_events", "list_job_checkpoints", "pause_job"):
            await getattr(tuning, method)(job.id, request)

    asyncio.run(ask())
    assert len(threads) >= 5
    assert threading.get_ident() not in threads


def test_jobs_train_and_are_served(start, tmp_path):
    server, folder = start(), tmp_path / "data"
    client = server.client()
    file = client.files.create(file=("train.jsonl", lines()), purpose="fine-tune")
    settings = {"type": "supervised", "supervised": {"hyperparameters": HYPERPARAMETERS}}
    whole = client.fine_tuning.jobs.create(
        model=BASE, training_file=file.id, suffix="mine", method=settings, seed=3
    )
    assert whole.status == "queued"
    paused = client.fine_tuning.jobs.create(model=BASE, training_file=file.id, method=settings, seed=3)
    _refusals(client, file.id)
    client.files.delete(file.id)  # jobs have the content
    _finishes(server, client, whole.id)
    _survives(client, folder, paused.id, losses(client, whole.id))
    killed = wait(client, paused.id, "running")
    server.close()
    server = start()  # with a job that trains, and one that is served
    client = server.client()
    assert client.models.retrieve(f"ft:{BASE}:mine").id == f"ft:{BASE}:mine"
    done = wait(client, killed.id, "succeeded")
    assert losses(client, done.id) == losses(client, whole.id)  # across a pause, a kill -9 and a restart
    prompt = {"prompt": "<user>a</s>\n<assistant>", "max_tokens": 8, "temperature": 0}
    texts = [
        client.completions.create(model=m, **prompt).choices[0].text
        for m in (done.fine_tuned_model, f"ft:{BASE}:mine")
    ]
    assert texts[0] == texts[1]
    _fails(client, folder)


def test_a_running_job_is_cancelled_and_preferences_are_learned(start, tmp_path):
    server, folder = start(), tmp_path / "data"
    client = server.client()
    held_out = client.files.create(file=("held-out.jsonl", lines(4)), purpose="fine-tune").id
    _cancels(client, folder, client.files.create(file=("a.jsonl", lines()), purpose="fine-tune").id, held_out)
    _prefers(client)


def _cancels(client, folder, file_id, held_out):
    """A job with held-out examples of its own, after an epoch."""
    jobs = client.fine_tuning.jobs
    job = jobs.create(
        model=BASE, training_file=file_id, validation_file=held_out, hyperparameters=HYPERPARAMETERS
    )
    assert job.validation_file == held_out
    wait(client, job.id, "running")
    pid = process(folder, job.id)
    birth = process_birth(pid)

    def validated():
        events = [event.data for event in jobs.list_events(job.id, limit=100) if event.type == "metrics"]
        return {data["step"]: data["full_valid_loss"] for data in events if "full_valid_loss" in data}

    _train_until(validated, pid)
    cancelled = jobs.cancel(job.id)
    assert (cancelled.status, cancelled.fine_tuned_model) == ("cancelled", None)
    assert cancelled.finished_at >= cancelled.created_at
    _until(lambda: _waits(pid, signal.SIGTERM))
    os.kill(pid, signal.SIGCONT)
    _until(lambda: process(folder, job.id) is None)
    assert process_birth(pid) != birth
    assert list(validated()) == [5]  # 20 examples, 4 a step
    assert 0 < validated()[5] < 10
    done = len(losses(client, job.id))
    assert 5 <= done < 60
    assert [one.step_number for one in jobs.checkpoints.list(job.id)] == [done]  # of the last step
    assert jobs.retrieve(job.id).status == "cancelled"
    assert [model.id for model in client.models.list() if model.id.startswith("ft:")] == []


def _prefers(client):
    pairs = [
        {
            "input": {"messages": [{"role": "user", "content": letter}]},
            "preferred_output": [{"role": "assistant", "content": "yes"}],
            "non_preferred_output": [{"role": "assistant", "content": "no"}],
        }
        for letter in "abcdefghijklmnop"
    ]
    content = "".join(json.dumps(pair) + "\n" for pair in pairs).encode()
    file = client.files.create(file=("pairs.jsonl", content), purpose="fine-tune")
    numbers = {"beta": 0.2, "n_epochs": 4, "batch_size": 4, "lora_rank": 4, "learning_rate": 0.01}
    job = client.fine_tuning.jobs.create(
        model=BASE, training_file=file.id, suffix="polite",
        method={"type": "dpo", "dpo": {"hyperparameters": numbers}},
    )  # fmt: skip
    done = wait(client, job.id, "succeeded", "failed")
    assert (done.error, done.fine_tuned_model) == (None, f"ft:{BASE}:polite")
    assert (done.method.type, done.method.dpo.hyperparameters.beta) == ("dpo", 0.2)
    events = [event.data for event in client.fine_tuning.jobs.list_events(job.id, limit=100)][::-1]
    steps = [data for data in events if data]
    assert steps[0]["train_loss"] == pytest.approx(0.6931, abs=1e-3)  # both models agree at first
    assert steps[-1]["train_loss"] < 0.5
    assert steps[-1]["train_accuracy"] == 1.0
    ask = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}
    answer = client.chat.completions.create(model=done.fine_tuned_model, **ask)
    assert answer.model == done.fine_tuned_model
    assert answer.usage.completion_tokens > 0


def _finishes(server, client, job_id):
    url = f"{server.url}/v1/fine_tuning/jobs/{job_id}/events?stream=true"
    with httpx.stream("GET", url, timeout=4 * PATIENCE) as streamed:
        events = [line.removeprefix("data: ") for line in streamed.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert [json.loads(event)["data"]["step"] for event in events[:-1] if '"metrics"' in event] == list(
        range(1, 61)
    )
    job = client.fine_tuning.jobs.retrieve(job_id)
    assert (job.status, job.fine_tuned_model, job.error) == ("succeeded", f"ft:{BASE}:mine", None)
    assert job.trained_tokens > 1000
    assert job.finished_at >= job.created_at
    curve = losses(client, job_id)
    assert curve[-1] < 0.7 * curve[0]
    steps = [one.step_number for one in client.fine_tuning.jobs.checkpoints.list(job_id)]
    assert steps == [60, 50, 40]
    ask = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8, "temperature": 0}
    answers = {
        model: client.chat.completions.create(model=model, **ask) for model in (BASE, job.fine_tuned_model)
    }
    assert len({answer.choices[0].message.content for answer in answers.values()}) == 2


def _survives(client, folder, job_id, expected):
    """A pause and a kill -9."""
    jobs = client.fine_tuning.jobs
    wait(client, job_id, "running")
    _train_until(lambda: len(losses(client, job_id)) >= 2, process(folder, job_id))
    assert os.getpriority(os.PRIO_PROCESS, process(folder, job_id)) == 19
    score = Path(f"/proc/{process(folder, job_id)}/oom_score_adj")
    assert not score.exists() or score.read_text() == "1000\n"  # the kernel ends it before the server
    group = Path(f"/proc/{process(folder, job_id)}/autogroup")
    assert not group.exists() or group.read_text().endswith("nice 19\n")
    assert jobs.pause(job_id).status == "paused"
    _until(lambda: _waits(process(folder, job_id), signal.SIGTERM))
    os.kill(process(folder, job_id), signal.SIGCONT)
    _until(lambda: process(folder, job_id) is None)
    done = len(losses(client, job_id))
    assert 2 <= done < 60
    assert jobs.resume(job_id).status == "queued"
    _until(lambda: process(folder, job_id) is not None)
    _train_until(lambda: len(losses(client, job_id)) > done, process(folder, job_id))
    os.kill(process(folder, job_id), signal.SIGKILL)
    _until(lambda: "unexpectedly" in " ".join(event.message for event in jobs.list_events(job_id, limit=100)))
    seen = losses(client, job_id)
    assert seen == expected[: len(seen)]


def _refusals(client, file_id):
    for changes, message in (
        ({"model": "nobody"}, "nobody"),
        ({"training_file": "file-none"}, "file-none"),
        ({"hyperparameters": {"n_epochs": 0}}, "epochs=0 cannot work"),
        ({"hyperparameters": {"momentum": 1}}, "'momentum' is no setting"),
        ({"method": {"type": "ppo"}}, "'ppo' is not known: choose one of supervised, dpo"),
    ):
        with pytest.raises(openai.APIStatusError, match=message):
            client.fine_tuning.jobs.create(**{"model": BASE, "training_file": file_id, **changes})
    other = client.files.create(file=("a.txt", b"a"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="upload it with purpose 'fine-tune'"):
        client.fine_tuning.jobs.create(model=BASE, training_file=other.id)
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.retrieve("ftjob-none")


def _fails(client, folder):
    file = client.files.create(file=("bad.jsonl", lines(3) + b"{\n"), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model=BASE, training_file=file.id, hyperparameters={"qlora": False, "gradient_checkpointing": False}
    )
    queued = client.fine_tuning.jobs.create(model=BASE, training_file=file.id)
    assert client.fine_tuning.jobs.cancel(queued.id).status == "cancelled"
    with pytest.raises(
        openai.BadRequestError, match="is cancelled: only queued or running or paused jobs take cancel"
    ):
        client.fine_tuning.jobs.cancel(queued.id)
    settings = json.loads((folder / "fine_tuning" / job.id / "settings.json").read_text())
    assert settings["qlora"] is False  # `false` is a choice: auto is another
    failed = wait(client, job.id, "failed")
    assert "1 of 4 lines cannot be trained: line 4 is no JSON" in failed.error.message
    assert len(client.fine_tuning.jobs.list(limit=2).data) == 2


def _train_until(happens, pid):
    """A job that runs for moments, and is stopped then: it is far from its end, however fast the machine is."""
    deadline = time.monotonic() + 4 * PATIENCE
    while not happens():
        assert time.monotonic() < deadline
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)
        os.kill(pid, signal.SIGSTOP)


def _waits(pid, number):
    """Whether this signal waits for the process, which is stopped."""
    waiting = re.search(r"ShdPnd:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return int(waiting[1], 16) >> (number - 1) & 1


def _until(happens):
    deadline = time.monotonic() + 4 * PATIENCE
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.05)
