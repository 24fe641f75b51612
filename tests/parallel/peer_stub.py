"""A peer without a model: what it is told to do, it does. `python -m tests.parallel.peer_stub RANK REPORTS MEMORY`."""

import json
import os
import sys
import time

from quire.parallel.ranks import BEAT, read_frames


def main() -> None:
    rank, reports = int(sys.argv[1]), int(sys.argv[2])
    frames = read_frames(sys.stdin.buffer)
    does = json.loads(next(frames))["does"]
    os.write(reports, BEAT)
    if rank == 1 and does == "fail":
        os.write(reports, json.dumps(("ConfigError", "there is no GPU here")).encode() + b"\n")
    elif rank == 1 and does == "exit":
        os._exit(3)
    for _ in frames:
        pass
    time.sleep(0.0)


if __name__ == "__main__":
    main()
