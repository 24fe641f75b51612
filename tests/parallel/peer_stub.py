"""A peer without a model: what it is told to do, it does. `python -m tests.parallel.peer_stub RANK REPORTS MEMORY`."""

import json
import os
import random
import sys
import time

from quire.core.errors import EngineDead
from quire.parallel.ranks import BEAT, read_frames
from quire.parallel.wire import decode_step


def main() -> None:
    rank, reports = int(sys.argv[1]), int(sys.argv[2])
    frames = read_frames(sys.stdin.buffer)
    does = json.loads(next(frames))["does"]
    os.write(reports, BEAT)
    os.pwrite(int(sys.argv[3]), b"1", rank)  # from here on it is heard of
    if rank == 1 and does == "fail":
        os.write(reports, json.dumps(("ConfigError", "there is no GPU here")).encode() + b"\n")
    elif rank == 1 and does == "exit":
        os._exit(3)
    elif rank == 1 and does == "babble":
        drawn = random.Random(0)
        for _ in range(10_000):
            os.write(reports, drawn.randbytes(drawn.randrange(1, 64)))
        os.write(reports, b"\n")  # a report ends here, however its bytes were joined
    elif rank == 1 and does == "count":  # frames that are no step, until an empty one
        count = 0
        while data := next(frames):
            try:
                decode_step(data)
            except EngineDead:
                count += 1
        os.write(reports, json.dumps(("ConfigError", f"{count} frames refused")).encode() + b"\n")
    for _ in frames:
        pass
    time.sleep(0.0)


if __name__ == "__main__":
    main()
