"""An engine process whose client is on another machine: `python -m quire.link.remote_worker ADDRESS PIPE`.

As worker.py, with the keys on stdin before the config.
"""

import sys
from functools import partial

from quire.link import worker
from quire.link.remote import RemoteWorkerChannel, read_keys


def main() -> int:
    return worker.main(partial(RemoteWorkerChannel, read_keys()))


if __name__ == "__main__":
    sys.exit(main())
