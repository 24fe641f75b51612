"""Jobs: one training process at a time, which outlives the server. Every job's state is in its folder.

A job's process is found again after a restart by its id and start time. One that ended without a result was killed: it
is started again, and goes on from its last checkpoint.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.core.errors import EngineDead, InvalidRequest, QueueFull, QuireError
from quire.observe.host import memory_left, numbers_in, process_birth
from quire.observe.logs import get_logger
from quire.train.run_files import RunFiles, RunLog, write_json
from quire.train.settings import FAILED, FINISHED

log = get_logger(__name__)
QUEUED, RUNNING, PAUSED = "queued", "running", "paused"
SUCCEEDED, CANCELLED = "succeeded", "cancelled"
ENDED = (SUCCEEDED, FAILED, CANCELLED)
POLL_SECONDS = 0.25
KILL_SECONDS = 30.0  # for a process to write its checkpoint
MAX_OPEN = 100  # jobs of one owner that have not ended
MAX_STARTS = 3  # in a row without a new step
LOWEST_PRIORITY = 19
# of the server's QUIRE_ variables: others are flags of its own, and would change those of a job
PASSED_ON = (
    "QUIRE_CACHE", "QUIRE_KERNELS", "QUIRE_ISA", "QUIRE_BUILTIN_WHEEL", "QUIRE_LOG_LEVEL", "QUIRE_LOG_FORMAT",
)  # fmt: skip
Register = Callable[[str, Path], Awaitable[None]]  # (an adapter's name, its folder)


@dataclass(slots=True)
class Job:
    """A job's record, as job.json keeps it."""

    id: str
    owner: str
    model: str  # as served
    base: str | None  # what the process loads
    suffix: str | None
    training_file: str
    validation_file: str | None
    flags: dict[str, Any]  # of quire finetune
    hyperparameters: dict[str, Any]  # as given
    method: str
    seed: int
    created_at: int
    metadata: dict[str, str] | None = None
    status: str = QUEUED
    finished_at: int | None = None
    error: str | None = None
    pid: int | None = None
    pid_started: str = ""  # tells a process from a later one with its id
    num_starts: int = 0  # since the last new step
    last_step: int = 0
    ended_at: float = 0.0  # when its process was told to end
    memory: int = 0  # bytes that must be free before it starts again

    @property
    def adapter(self) -> str:
        """A name that is also a folder's."""
        return f"ft:{self.model.rpartition('/')[2]}:{self.suffix or self.id[-8:]}"


class Jobs:
    """Use it from one event loop."""

    def __init__(self, folder: Path, num_threads: int, register: Register) -> None:
        self._folder = folder
        self._num_threads = num_threads
        self._register = register
        self._jobs: dict[str, Job] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._held: dict[str, int] = {}  # bytes of memory of their processes
        self._faults: dict[str, str] = {}  # of jobs that cannot go on now, by their ids
        self._watcher: asyncio.Task[None] | None = None
        self._creating = asyncio.Lock()

    # ------------------------------------------------------------------ requests

    async def create(self, job: Job, training: Path, validation: Path | None) -> None:
        """Takes the job; QueueFull if its owner has too many. Files are linked, so that they may be deleted."""
        async with self._creating:
            self.refuse_if_taken(job)
            if sum(other.status not in ENDED for other in self.all_of(job.owner)) >= MAX_OPEN:
                raise QueueFull(
                    f"{MAX_OPEN} fine-tuning jobs wait or run: cancel some, or wait until one ends"
                )
            await asyncio.to_thread(self._write, job, training, validation)
            self._jobs[job.id] = job
        self._watch()

    def _write(self, job: Job, training: Path, validation: Path | None) -> None:
        folder = self.folder(job)
        folder.mkdir(parents=True)
        for name, path in (("training.jsonl", training), ("validation.jsonl", validation)):
            if path is not None:
                os.link(path, folder / name)
        flags = {**job.flags, "num-threads": self._num_threads, "nice": LOWEST_PRIORITY}
        if validation is not None:
            flags["validation"] = str(folder / "validation.jsonl")
        write_json(folder / "settings.json", flags)
        self._save(job)
        self._say(job, f"Created fine-tuning job: {job.id}")

    def get(self, owner: str, job_id: str) -> Job | None:
        job = self._jobs.get(job_id)
        return job if job is not None and job.owner == owner else None

    def all_of(self, owner: str) -> list[Job]:
        """The newest first."""
        return sorted(
            (job for job in self._jobs.values() if job.owner == owner), key=lambda job: -job.created_at
        )

    def refuse_if_taken(self, job: Job) -> None:
        """InvalidRequest where another owner's adapter has or will have the job's name."""
        for other in self._jobs.values():
            is_other = other.owner != job.owner and other.status not in (FAILED, CANCELLED)
            if is_other and other.adapter == job.adapter:
                raise InvalidRequest(f"the name {job.adapter} is taken: choose another suffix", "suffix")

    def change(self, job: Job, status: str) -> None:
        """Cancels or pauses a job that has not ended, or resumes one, also one that failed."""
        job.status, job.error = status, None
        job.finished_at = int(time.time()) if status == CANCELLED else None
        done = {QUEUED: "Resumed", PAUSED: "Paused", CANCELLED: "Cancelled"}[status]
        self._say(job, f"{done} job: {job.id}")
        job.num_starts = job.memory = 0
        self._save(job)
        self._watch()

    def files(self, job: Job) -> RunFiles:
        return RunFiles(self.adapter_folder(job))

    def events(self, job: Job) -> list[dict[str, Any]]:
        """Messages of the job and metrics of its steps, the oldest first. A `key` stays with its event."""
        logs = {"m": RunLog(self.folder(job) / "events.jsonl"), "s": self.files(job).log}
        both = [
            {**event, "key": f"{name}{at}"}
            for name, log in logs.items()
            for at, event in enumerate(log.read())
        ]
        return sorted(both, key=lambda event: int(event["created_at"]))

    def folder(self, job: Job) -> Path:
        return self._folder / job.id

    def adapter_folder(self, job: Job) -> Path:
        return self.folder(job) / "adapter"

    # ------------------------------------------------------------------ processes

    async def resume(self) -> None:
        """Goes on with what an earlier server left."""
        for path in sorted(self._folder.glob("*/job.json")):
            try:
                job = Job(**json.loads(path.read_text()))
            except (OSError, TypeError, ValueError) as error:
                log.warning("job       %s cannot be read (%s): it is left out", path, error)
                continue
            self._jobs[job.id] = job
        self._watch()

    async def close(self) -> None:
        """Training goes on."""
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher

    def _watch(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watching(), name="fine-tuning")

    async def _watching(self) -> None:
        """Until no job runs, waits or has to end."""
        while await self._look():
            await asyncio.sleep(POLL_SECONDS)

    @contextmanager
    def _kept_going(self, job: Job) -> Iterator[None]:
        """A fault of one job is logged once, and the job tried again; others are followed meanwhile."""
        try:
            yield
        except Exception as error:
            if self._faults.get(job.id) != str(error):
                self._faults[job.id] = str(error)
                text = "job       %s cannot go on now (%s): if the disk is full, free some space"
                log.warning(text, job.id, error, exc_info=not isinstance(error, OSError))
        else:
            self._faults.pop(job.id, None)

    async def _look(self) -> bool:
        """Follows processes and starts the next one; False where nothing is left to do."""
        jobs = self._jobs.values()
        active = [job for job in jobs if job.pid is not None or job.status in (QUEUED, RUNNING)]
        for job in active:
            if job.pid is not None:
                with self._kept_going(job):
                    await self._follow(job)
        waiting = [job for job in active if job.pid is None and job.status in (RUNNING, QUEUED)]
        waiting = [job for job in waiting if job.memory == 0 or memory_left()[0] >= job.memory]
        if waiting and not any(job.pid is not None for job in jobs):
            job = min(waiting, key=lambda job: (job.status != RUNNING, job.created_at))
            with self._kept_going(job):
                result = self.files(job).result()
                if result is not None and result["status"] == FINISHED:  # and could not be registered
                    await self._publish(job)
                else:
                    self._start(job)
        return bool(active)

    def _start(self, job: Job) -> None:
        folder = self.folder(job)
        self.files(job).begun()
        command = [sys.executable, "-m", "quire", "finetune", str(folder / "training.jsonl")]
        command += ["--output", str(self.adapter_folder(job)), "--config", str(folder / "settings.json")]
        if job.base is not None:
            command += ["--model", job.base]
        kept = {k: v for k, v in os.environ.items() if k in PASSED_ON or not k.startswith("QUIRE_")}
        with (folder / "log.txt").open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=kept
            )  # fmt: skip
        self._children[job.id] = process
        job.num_starts, job.memory = job.num_starts + 1, 0
        job.pid, job.pid_started = process.pid, process_birth(process.pid) or ""
        if job.status != RUNNING:
            job.status = RUNNING
            self._say(job, "Fine-tuning job started")
        self._save(job)
        log.info("job       %s trains in process %d", job.id, process.pid)

    async def _follow(self, job: Job) -> None:
        """Ends the process of a job that is paused or cancelled, and takes the result of one that has ended."""
        if self._is_alive(job):
            if job.status in (PAUSED, CANCELLED):
                self._end(job)
            self._held[job.id] = numbers_in(Path(f"/proc/{job.pid}/status")).get("RssAnon", 0) << 10
            return
        child, held = self._children.pop(job.id, None), self._held.pop(job.id, 0)
        if child is not None and child.poll() == -signal.SIGKILL:  # as Linux does where memory runs out
            job.memory = held
        if job.status != CANCELLED:
            await self._take_result(job)
        job.pid, job.ended_at = None, 0.0
        self._save(job)

    async def _take_result(self, job: Job) -> None:
        result = self.files(job).result()
        status = None if result is None else result["status"]
        if status == FINISHED:
            await self._publish(job)
        elif status == FAILED and result is not None:
            self._fail(job, str(result["error"]))
        elif job.status != RUNNING:
            return
        elif result is not None and result.get("memory", 0) > (total := memory_left()[1]):
            needed = f"it needs {result['memory'] / 1e9:.1f} of {total / 1e9:.1f} GB"
            self._fail(job, f"{result['error']}, and {needed}: use a smaller base, or qlora")
        elif result is not None and result.get("memory"):
            job.status, job.num_starts, job.memory = QUEUED, 0, result["memory"]
            needed = f"{job.memory / 1e9:.1f} GB are free"
            self._say(job, f"Paused: {result['error']}: the job goes on by itself when {needed}")
        else:  # killed, or told to end by another than this server
            step = max((event.get("step", 0) for event in self.files(job).log.read()), default=0)
            if step > job.last_step:
                job.last_step, job.num_starts = step, 0
            if job.num_starts >= MAX_STARTS:
                self._fail(
                    job,
                    f"its process was killed {MAX_STARTS} times without a new step; the last line of its log: "
                    f"{self._last_line(job)}",
                )
            else:
                when = f" when {job.memory / 1e9:.1f} GB are free" if job.memory else ""
                text = "The training process ended unexpectedly: it goes on from the last checkpoint"
                self._say(job, text + when)

    async def _publish(self, job: Job) -> None:
        """Registers the adapter of a run that has finished; while the engine is down the job stays as it is."""
        error = None
        try:
            await self._register(job.adapter, self.adapter_folder(job))
        except EngineDead:
            return
        except (QuireError, OSError) as fault:
            error = fault
        if job.status == CANCELLED:  # meanwhile
            return
        if error is not None:
            self._fail(job, f"the adapter is trained, and cannot be served: {error}")
        else:
            job.status, job.finished_at = SUCCEEDED, int(time.time())
            self._say(job, f"New fine-tuned model created: {job.adapter}")
            self._say(job, "The job has successfully completed")
        self._save(job)

    def _last_line(self, job: Job) -> str:
        with suppress(OSError):
            lines = (self.folder(job) / "log.txt").read_text(errors="replace").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "its log is empty")[-500:]
        return "it has no log"

    def _fail(self, job: Job, error: str) -> None:
        job.status, job.error, job.finished_at = FAILED, error, int(time.time())
        self._say(job, f"The job failed: {error}", "error")

    def _end(self, job: Job) -> None:
        assert job.pid is not None
        now = time.time()
        with suppress(ProcessLookupError):
            if not job.ended_at:
                job.ended_at = now
                os.kill(job.pid, signal.SIGTERM)
            elif now > job.ended_at + KILL_SECONDS:
                os.kill(job.pid, signal.SIGKILL)

    def _is_alive(self, job: Job) -> bool:
        child = self._children.get(job.id)
        if child is not None:
            return child.poll() is None
        assert job.pid is not None
        return bool(job.pid_started) and process_birth(job.pid) == job.pid_started

    # ------------------------------------------------------------------ files

    def _say(self, job: Job, message: str, level: str = "info") -> None:
        RunLog(self.folder(job) / "events.jsonl").say(message, level)

    def _save(self, job: Job) -> None:
        write_json(self.folder(job) / "job.json", asdict(job))
