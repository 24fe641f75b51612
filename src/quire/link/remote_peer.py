"""A rank on another machine than rank 0: `python -m quire.link.remote_peer ADDRESS PIPE RANK`, keys on stdin.

Passes bytes between the rank's process and `fleet/ray_ranks.py`, which stands in its place beside rank 0.
"""

import os
import subprocess
import sys
import threading

from quire.link.remote import RemoteWorkerChannel, read_keys
from quire.observe.host import end_with_parent

PEER = "quire.engine.build.peer"  # the rank's program


def main() -> None:
    channel = RemoteWorkerChannel(read_keys(), sys.argv[1])
    threading.Thread(target=_end_with_host, name="host-watch", daemon=True).start()
    reports, end = os.pipe()
    command = (sys.executable, "-m", PEER, sys.argv[3], str(end), "-1")
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=2, pass_fds=(end,), bufsize=0, preexec_fn=end_with_parent
    )
    os.close(end)
    assert child.stdin is not None
    channel.pass_on(child.stdin, reports)
    channel.close()
    code = child.wait()
    if code < 0:
        os.kill(os.getpid(), -code)  # this process ends as the rank did
    os._exit(code)  # at a usual exit Python aborts, since a thread reads stdin


def _end_with_host() -> None:
    sys.stdin.buffer.read()
    os._exit(0)  # and the rank with this process


if __name__ == "__main__":
    main()
