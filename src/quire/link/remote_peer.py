"""A rank on another machine than rank 0: `main` with the arguments ADDRESS PIPE RANK, keys on stdin.

Passes messages between the rank's process and `link/ray_ranks.py`, which stands in its place beside rank 0.
"""

import os
import subprocess
import sys
import threading
from multiprocessing.connection import Pipe

from quire.link.remote import RemoteWorkerChannel, read_keys
from quire.observe.host import end_with_parent, python_command

PEER = "quire.engine.build.peer"  # the rank's program


def main() -> None:
    channel = RemoteWorkerChannel(read_keys(), sys.argv[1])
    threading.Thread(target=_end_with_host, name="host-watch", daemon=True).start()
    stdin, frames = Pipe(duplex=False)
    reports, end = Pipe(duplex=False)
    with stdin, end:
        command = python_command(PEER, sys.argv[3], end.fileno(), -1)
        child = subprocess.Popen(
            command, stdin=stdin.fileno(), stdout=2, pass_fds=(end.fileno(),), preexec_fn=end_with_parent
        )
    channel.pass_on(frames, reports)
    channel.close()
    code = child.wait()
    if code < 0:
        os.kill(os.getpid(), -code)  # this process ends as the rank did
    os._exit(code)  # at a usual exit Python aborts, since a thread reads stdin


def _end_with_host() -> None:
    sys.stdin.buffer.read()
    os._exit(0)  # and the rank with this process
