"""A rank whose third step never ends: `main` as that of engine/build/peer.py."""

import time

from quire.engine.build import peer
from quire.parallel import ranks
from quire.runner.cpu import CpuOps


def main() -> None:
    ranks.HUNG_SECONDS = 1.0
    num_steps, forward = 0, CpuOps.forward

    def hang(*arguments: object) -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            time.sleep(600)
        return forward(*arguments)

    CpuOps.forward = hang
    peer.main()
