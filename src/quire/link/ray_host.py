"""Processes on other machines: Ray chooses a machine, accounts for its GPUs and cores and starts an EngineHost there.

That starts the process, which connects to this one itself (TCP with CURVE keys): nothing of a request or a step passes
through Ray. Imported only where Ray is asked for: a ConfigError where it is not installed.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq

from quire.core.errors import ConfigError, EngineDead
from quire.link.heartbeat import until_hung
from quire.link.remote import LINK_FAULTS, RemoteChannel
from quire.observe.host import ending, python_command
from quire.observe.logs import get_logger

try:
    import ray
except ImportError as error:
    raise ConfigError(
        f"the backend ray needs Ray ({error}): pip install 'quire[ray]', on every machine"
    ) from error

if TYPE_CHECKING:
    from ray.actor import ActorHandle

log = get_logger(__name__)
VERSION: str = sys.modules["quire"].__version__  # importing it would be an import of the rooms above
CONNECT_SECONDS = 5.0
PLACE_SECONDS = 30.0  # for a machine with room, before the next try
REASON_SECONDS = 0.3  # a process that ended says why soon after its connection is lost
LOST = "is not connected any more: the process or its machine is gone"
# with empty SETTINGS
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
ENVIRONMENT = ("GLOO_", "HF_", "QUIRE_LOG_")  # variables that the processes get from this one


def join(address: str | None) -> tuple[str, list[dict[str, float]]]:
    """Joins the cluster that this machine belongs to, or the one at `address`: this machine's address there, and what
    each node has.
    """
    _check_address(address)
    try:
        ray.init(address or "auto", logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster at {address or 'this machine'} ({_first_line(error)}): start one with "
            "`ray start --head`, join it with `ray start --address HOST:6379`, or give --ray-address, for ranks "
            "RAY_ADDRESS"
        ) from None
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return str(ray.util.get_node_ip_address()), nodes


def _check_address(address: str | None) -> None:
    """Ray tries for minutes; an address where no gRPC server answers is found at once."""
    if address is None or address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "://" in address:
        raise ConfigError(
            f"ray_address={address!r}: write HOST:PORT of the cluster's head, such as 10.0.0.1:6379, and start the "
            "server on a machine of the cluster"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
            connection.sendall(HTTP2_PREFACE)
            if connection.recv(4)[3:] != HTTP2_PREFACE[-6:-5]:
                raise OSError("another server listens there")
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster at {address} ({error}): start one with `ray start --head`, or correct --ray-address, "
            "for ranks RAY_ADDRESS"
        ) from None


def _first_line(error: BaseException) -> str:
    error = getattr(error, "cause", None) or error  # of a call that failed there
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@dataclass(frozen=True, slots=True)
class Hosted:
    """A process on another machine that waits for its config."""

    key: bytes  # public
    pid: int
    node: str
    version: str


class EngineHost:
    """A Ray actor: starts one process on its machine, and ends with it. Ray ends it with the process that asked for it,
    or that with it: the process notices either.
    """

    def prepare(self, address: str, environment: dict[str, str], program: str, *arguments: str) -> Hosted:
        self._address = address
        self._beats, pipe = os.pipe()
        self._public, self._secret = zmq.curve_keypair()
        self._child = subprocess.Popen(
            python_command(program, address, pipe, *arguments),
            stdin=subprocess.PIPE,
            pass_fds=(pipe,),
            env={**os.environ, **environment},
        )
        os.close(pipe)
        node = f"{ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]})"
        return Hosted(self._public, self._child.pid, node, VERSION)

    def run(self, client_key: bytes, config: bytes, timeout: float) -> str:
        """Returns how the engine ended. `timeout` is for one step."""
        assert self._child.stdin is not None
        self._child.stdin.write(client_key + self._public + self._secret + config)
        self._child.stdin.flush()
        hung = asyncio.run(_kill_when_hung(self._child, self._beats, timeout))
        code = self._child.wait()
        return hung or (LINK_FAULTS[code].format(self._address) if code in LINK_FAULTS else ending(code))


async def _kill_when_hung(child: "subprocess.Popen[bytes]", beats: int, timeout: float) -> str | None:
    """Returns when the process has ended, or was killed and why. Not a method: Ray runs such actors otherwise."""
    ended = asyncio.create_task(asyncio.to_thread(child.wait))
    await asyncio.to_thread(os.read, beats, 1)  # the first beat, when it serves, or the end
    hung = asyncio.create_task(until_hung(beats, timeout, lambda: True))
    await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
    child.kill()
    hung.cancel()
    return None if ended.done() else hung.result()


class HostedProcess:
    """A process on another machine, as the supervisor sees it."""

    def __init__(self, host: "ActorHandle", pid: int, run: Any) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.how: str | None = None  # it ended, unless it was killed
        self._host = host
        self._killed = asyncio.Event()
        self._ended = asyncio.create_task(self._end(run))

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, _signal: int) -> None:
        """Every signal ends it: the engine ends with its host."""
        self._killed.set()

    async def _end(self, run: Any) -> int:
        killed, ended = asyncio.create_task(self._killed.wait()), asyncio.ensure_future(_result(run))
        await asyncio.wait({killed, ended}, return_when=asyncio.FIRST_COMPLETED)
        self.how = ended.result() if ended.done() else None
        killed.cancel()
        ended.cancel()
        ray.kill(self._host)
        self.returncode = 0 if self.how == ending(0) else 1
        return self.returncode


async def _result(run: Any) -> str:
    try:
        return str(await run)
    except ray.exceptions.RayError as error:
        return f"was lost by Ray: {_first_line(error)}"


async def place(
    channel: RemoteChannel, what: str, resources: dict[str, float], program: str, *arguments: str
) -> tuple["ActorHandle", Hosted]:
    """Starts `program` on a machine that has these resources, and lets it connect."""
    # SPREAD: on the machine with the fewest of them, where another has room
    host = ray.remote(EngineHost).options(scheduling_strategy="SPREAD", **resources).remote()
    log.info("ray       the %s asks for a machine with %s", what, resources)
    environment = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}
    preparing = host.prepare.remote(channel.path, environment, program, *arguments)
    try:
        hosted = await asyncio.wait_for(preparing, PLACE_SECONDS)
        if hosted.version != VERSION:
            raise ConfigError(
                f"quire {hosted.version} is installed on node {hosted.node} and {VERSION} here: "
                "install one version on all machines"
            )
    except BaseException as fault:
        ray.kill(host)
        channel.close()
        if isinstance(fault, TimeoutError):
            raise EngineDead(
                f"no machine of the Ray cluster had {resources} free for the {what} within "
                f"{PLACE_SECONDS:.0f} s: add one, or start fewer replicas or ranks"
            ) from None
        if isinstance(fault, ray.exceptions.RayError):
            raise EngineDead(f"Ray cannot start the {what}: {_first_line(fault)}") from None
        raise
    log.info("ray       the %s is on node %s", what, hosted.node)
    channel.allow(hosted.key)
    return host, hosted
