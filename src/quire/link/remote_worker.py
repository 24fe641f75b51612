"""An engine process whose client is on another machine: `python -m quire.link.remote_worker ADDRESS PIPE`.

As worker.py, with three keys on stdin before the config: the client's public key, its own public and secret one.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.link import worker
from quire.link.channel import WorkerChannel
from quire.link.remote import LINK_FAULTS, REFUSED, UNREACHABLE, prepare_remote
from quire.observe.logs import get_logger

log = get_logger("quire.link.remote_worker")  # this module is __main__
KEY_BYTES = 40
CONNECT_SECONDS = 10.0


class RemoteWorkerChannel(WorkerChannel):
    """The engine's end. The process ends with the connection, which is never made a second time."""

    def __init__(self, keys: tuple[bytes, bytes, bytes], address: str) -> None:
        self._keys = keys
        super().__init__(address)

    def _connect(self, path: str) -> None:
        socket = self._socket
        prepare_remote(socket, path)
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = self._keys
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._events = socket.get_monitor_socket()
        socket.connect(path)
        deadline, fault = time.monotonic() + CONNECT_SECONDS, UNREACHABLE
        while self._events.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            event = recv_monitor_message(self._events)["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                threading.Thread(target=self._end_with_connection, name="link-watch", daemon=True).start()
                return
            if event == zmq.Event.CONNECTED:
                fault = REFUSED
            elif event in (zmq.Event.CLOSED, zmq.Event.DISCONNECTED, zmq.Event.HANDSHAKE_FAILED_AUTH):
                break
        log.error("the engine process %s", LINK_FAULTS[fault].format(path))
        sys.stderr.flush()
        os._exit(fault)

    def _end_with_connection(self) -> None:
        with suppress(zmq.ContextTerminated):  # by `close`
            while (event := recv_monitor_message(self._events)["event"]) != zmq.Event.MONITOR_STOPPED:
                if event == zmq.Event.DISCONNECTED:
                    log.error("the engine ends: its connection to the server is lost")
                    os._exit(0)
        self._events.close()

    def close(self) -> None:
        self._socket.disable_monitor()
        super().close()


def main() -> int:
    server, public, secret = (sys.stdin.buffer.read(KEY_BYTES) for _ in range(3))
    return worker.main(partial(RemoteWorkerChannel, (server, public, secret)))


if __name__ == "__main__":
    sys.exit(main())
