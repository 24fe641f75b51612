"""The engine link between machines: TCP with CURVE keys (ZeroMQ).

Both ends have a key pair and know the other's public key. Each engine process has its own: one with another key, or
with none, does not connect.
"""

import asyncio
import os
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from quire.core.errors import ConfigError
from quire.link.channel import Channel, WorkerChannel, prepare
from quire.observe.logs import get_logger

log = get_logger(__name__)
HEARTBEAT_SECONDS, SILENT_SECONDS = 1, 5  # a machine that answers no heartbeat that long is gone
CONNECT_SECONDS = 10.0
KEY_BYTES = 40
CLOSE_MS = 50  # for the closed connection to leave the socket
REFUSED_HANDSHAKES = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)
# exit codes of an engine process that does not get as far as a connection
UNREACHABLE, REFUSED = 3, 4
LINK_FAULTS = {
    UNREACHABLE: "cannot reach the server at {}: open this port between the machines "
    "(--data-parallel-rpc-port chooses those of replicas)",
    REFUSED: "was refused by the server at {}: the keys do not match; another server has this port, perhaps",
}


def prepare_remote(socket: zmq.Socket[Any], address: str) -> None:
    prepare(socket)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_SECONDS * 1000)


class RemoteChannel(Channel):
    """The client's end, which listens on `path`. Nothing connects before `allow`."""

    def __init__(self, host: str, port: int = 0) -> None:
        self.key, secret = zmq.curve_keypair()
        self._allowed: bytes | None = None
        self._context = zmq.asyncio.Context()
        self._keys = self._context.socket(zmq.REP)
        self._keys.bind("inproc://zeromq.zap.01")  # where ZeroMQ asks whether a key may connect (RFC 27)
        self._checking = asyncio.create_task(self._check_keys(), name="link-keys")
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_server, self._socket.curve_secretkey = True, secret
        self._events = self._socket.get_monitor_socket(
            zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | REFUSED_HANDSHAKES
        )
        shown = f"[{host}]" if ":" in host else host
        prepare_remote(self._socket, shown)
        try:
            self._socket.bind(f"tcp://{shown}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot listen on {shown}:{port} for an engine ({zmq.strerror(error.errno or 0)}): "
                "choose another --data-parallel-rpc-port"
            ) from error
        self.path = self._socket.get_string(zmq.LAST_ENDPOINT)

    @property
    def socket(self) -> "zmq.asyncio.Socket":
        """For bytes that are no messages."""
        return self._socket

    def allow(self, key: bytes) -> None:
        """Lets the engine connect that has this public key, and no other."""
        self._allowed = key

    async def _check_keys(self) -> None:
        while True:
            version, number, _domain, _address, _identity, _mechanism, key = await self._keys.recv_multipart()
            status = b"200" if z85.encode(key) == self._allowed else b"400"
            await self._keys.send_multipart([version, number, status, b"", b"", b""])

    async def lost(self) -> None:
        """Returns when an engine was connected and is no more."""
        warned = connected = False
        while True:
            event = await recv_monitor_message(self._events)
            if event["event"] & REFUSED_HANDSHAKES:
                if not warned:
                    log.warning("a connection to %s without the right key was refused", self.path)
                warned = True
                continue
            if event["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                connected = True
                continue
            await asyncio.sleep(CLOSE_MS / 1000)
            # A refused connection ends as well; the engine's is the only one that could be written to.
            if connected and not int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT:
                return

    def close(self) -> None:
        if not self._socket.closed:
            self._checking.cancel()
            self._socket.disable_monitor()
            self._context.destroy(linger=0)


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

    def pass_on(self, target: Connection, source: Connection) -> None:
        """Messages to `target`, and those of `source` back, until that ends."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(source.fileno(), zmq.POLLIN)
        with suppress(EOFError, OSError):
            while True:
                for ready, _event in poller.poll():
                    if ready is not self._socket:
                        self._socket.send(source.recv_bytes())
                        continue
                    with suppress(BrokenPipeError):  # it has ended: `source` may still say why
                        target.send_bytes(b"".join(self._socket.recv_multipart()))

    def close(self) -> None:
        self._socket.disable_monitor()
        super().close()


def read_keys() -> tuple[bytes, bytes, bytes]:
    """From stdin: the client's public key, this end's public and secret one."""
    server, public, secret = (sys.stdin.buffer.read(KEY_BYTES) for _ in range(3))
    return server, public, secret
