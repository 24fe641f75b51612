"""A peer without a model: what it is told to do, it does. `main` with the arguments RANK REPORTS MEMORY."""

import json
import os
import random
import sys
import time
from multiprocessing.connection import Connection

from quire.core.errors import ConfigError, EngineDead
from quire.parallel import ranks
from quire.parallel.group import Group
from quire.parallel.ranks import BEAT, Reporter, read_frames
from quire.parallel.wire import decode_step

STEP_SECONDS = 1.5


def _compute() -> None:
    ended = time.monotonic() + STEP_SECONDS
    while time.monotonic() < ended:
        sum(range(1000))


STEPS = {
    "hang in a step": lambda: time.sleep(60),
    "wait in a step": lambda: time.sleep(STEP_SECONDS),
    "compute in a step": _compute,
}


class Waiting(Group):
    def waits(self) -> bool:
        return True


def main() -> None:
    rank, reports = int(sys.argv[1]), Connection(int(sys.argv[2]), readable=False)
    frames = read_frames()
    does = json.loads(next(frames))["does"]
    reports.send_bytes(BEAT)
    os.pwrite(int(sys.argv[3]), b"1", rank)  # from here on it is heard of
    if rank == 1 and does == "fail":
        reports.send_bytes(json.dumps(("ConfigError", "there is no GPU here")).encode())
    elif rank == 1 and does == "exit":
        os._exit(3)
    elif rank == 1 and does == "babble":
        drawn = random.Random(0)
        for _ in range(10_000):
            os.write(reports.fileno(), drawn.randbytes(drawn.randrange(1, 64)))
    elif rank == 1 and does in STEPS:
        ranks.HUNG_SECONDS = 0.5
        reporter = Reporter(reports)
        reporter.groups = (Waiting(),) if does == "wait in a step" else ()
        next(frames)
        reporter.run(STEPS[does])
        reporter.fail(ConfigError("the step has ended"))
    elif rank == 1 and does == "count":  # frames that are no step, until an empty one
        count = 0
        while data := next(frames):
            try:
                decode_step(data)
            except EngineDead:
                count += 1
        reports.send_bytes(json.dumps(("ConfigError", f"{count} frames refused")).encode())
    for _ in frames:
        pass
    time.sleep(0.0)
