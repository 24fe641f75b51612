"""Channel: one socket between two processes of one user, in a private folder."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from quire.core.errors import ConfigError
from quire.link.messages import FromEngine, ToEngine, decode_from_engine, encode

_MAX_PATH = 100  # bytes; the system allows 107 for a local socket's name


class Channel:
    """The client's end. Each engine process gets a new one, so that no message of an old process can arrive."""

    def __init__(self) -> None:
        self._folder = _private_folder()
        self.path = str(self._folder / "engine")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _prepare(self._socket)
        self._socket.bind(f"ipc://{self.path}")

    def send(self, message: ToEngine) -> None:
        """Queues the message; never blocks. For use once the engine has sent a message."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        self._socket.send(data)  # zmq.asyncio sends at once where it can, and here it always can

    async def receive(self) -> FromEngine:
        return decode_from_engine(await self._socket.recv())

    def close(self) -> None:
        """Removes the socket and its folder. Calling it twice is fine."""
        if not self._socket.closed:
            self._socket.close(linger=0)
            self._context.term()
        remove_socket(self.path)


class WorkerChannel:
    """The engine's end."""

    def __init__(self, path: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _prepare(self._socket)
        self._socket.connect(f"ipc://{path}")

    def send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    def receive(self) -> bytes | None:
        """The next message, if one is there."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def wait(self, milliseconds: int) -> bool:
        """Whether a message came in that time."""
        return bool(self._socket.poll(milliseconds))

    def close(self) -> None:
        """Messages that were sent have a second to leave."""
        self._socket.close(linger=1000)
        self._context.term()


def remove_socket(path: str) -> None:
    """The socket's file and its folder, if they are still there."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def _prepare(socket: zmq.Socket[Any]) -> None:
    # No high-water mark: admission bounds the messages that can be under way.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


def _private_folder() -> Path:
    """A new folder of mode 0700, with a name short enough for a socket in it."""
    for parent in (None, "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="quire-", dir=parent))
        if len(os.fsencode(folder)) <= _MAX_PATH - len("/engine"):
            return folder
        folder.rmdir()
    raise ConfigError("no folder with a name short enough for a local socket: set TMPDIR to one such as /tmp")
