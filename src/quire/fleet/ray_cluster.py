"""Replicas on several machines: Ray chooses the machine and accounts for its GPUs and cores.

Ray starts an EngineHost there, which starts the engine process. The engine connects to the HTTP process itself (TCP
with CURVE keys): no request and no token passes through Ray.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import zmq

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, EngineDead
from quire.fleet.places import own_configs, with_threads
from quire.link.channel import Channel
from quire.link.client import EngineClient, unbounded
from quire.link.heartbeat import until_hung
from quire.link.messages import framed_config
from quire.link.remote import LINK_FAULTS, RemoteChannel
from quire.link.supervise import Process, Supervisor
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
ENVIRONMENT = ("GLOO_", "HF_", "QUIRE_LOG_")  # variables that the engines get from the HTTP process


@dataclass(frozen=True, slots=True)
class Hosted:
    """An engine process on another machine that waits for its config."""

    key: bytes  # public
    pid: int
    node: str
    version: str


class EngineHost:
    """A Ray actor: starts one engine process on its machine, and ends with it. Ray ends it with the HTTP process, or
    that with it: the engine notices either.
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
    """An engine process on another machine, as the supervisor sees it."""

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


class RaySupervisor(Supervisor):
    """One engine process at a time, each on a machine that Ray chooses."""

    def __init__(
        self, cluster: "RayCluster", config: EngineConfig, client: EngineClient, index: int, timeout: float
    ) -> None:
        super().__init__(unbounded(config), client, None, timeout, f"replica {index} engine")
        self._cluster = cluster
        self._index = index

    async def _launch(self) -> tuple[Process, Channel, int | None]:
        cluster, what = self._cluster, f"replica {self._index} engine"
        channel = RemoteChannel(cluster.host, cluster.rpc_port and cluster.rpc_port + self._index)
        resources = cluster.resources(self._config)
        host, hosted = await place(channel, what, resources, "quire.link.worker")
        self.node, self._what = hosted.node, f"{what} on node {hosted.node}"
        run = host.run.remote(channel.key, framed_config(self._config), self._timeout)
        return HostedProcess(host, hosted.pid, run), channel, None

    async def _kill_when_hung(self, process: Process, channel: Channel, _beats: int | None) -> None:
        """The host looks for hangs; here it is the connection that can fail."""
        assert isinstance(channel, RemoteChannel)
        await channel.lost()
        await asyncio.sleep(REASON_SECONDS)
        self._hung = LOST
        process.send_signal(9)

    def _how_it_ended(self, process: Process) -> Any:
        assert isinstance(process, HostedProcess)
        self._hung = process.how or self._hung
        return super()._how_it_ended(process)


class RayCluster:
    """The cluster that this machine belongs to, or the one at `address`, of which it must be a part."""

    def __init__(self, address: str | None = None, rpc_port: int = 0) -> None:
        """`rpc_port`: where the first replica connects, the next one at the next port; 0: any free ones."""
        _check_address(address)
        try:
            ray.init(address or "auto", logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster at {address or 'this machine'} ({_first_line(error)}): start one with "
                "`ray start --head`, join it with `ray start --address HOST:6379`, or give --ray-address, for ranks "
                "RAY_ADDRESS"
            ) from None
        self.rpc_port = rpc_port
        self.host: str = ray.util.get_node_ip_address()
        self._nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        log.info("ray       %d nodes; engines connect to %s", len(self._nodes), self.host)

    def supervisor(
        self, config: EngineConfig, index: int, timeout: float, client: EngineClient
    ) -> RaySupervisor:
        return RaySupervisor(self, config, client, index, timeout)

    def configs(self, config: EngineConfig, count: int, roles: Sequence[str] = ()) -> list[EngineConfig]:
        """The settings of each replica. Without GPUs each gets as many cores of one machine as all can have."""
        configs = own_configs(config, count, roles)
        if self._uses_gpus(config):
            return [replace(own, runner=replace(own.runner, device="cuda")) for own in configs]
        if config.runner.num_threads is not None:
            return configs
        together = config.parallel.ranks_on_machine
        cores = [int(node.get("CPU", 0)) // together for node in self._nodes]
        for threads in range(max(cores), 0, -1):
            if sum(each // threads for each in cores) >= count * config.parallel.num_ranks // together:
                return with_threads(configs, threads)
        raise ConfigError(
            f"data_parallel_size={count} and the {len(self._nodes)} nodes of the Ray cluster have "
            f"{sum(cores)} cores: start fewer replicas, or add nodes"
        )

    def resources(self, config: EngineConfig) -> dict[str, float]:
        """What a replica takes of a machine."""
        ranks = config.parallel.ranks_on_machine
        if self._uses_gpus(config):
            return {"num_cpus": 1, "num_gpus": ranks}
        return {"num_cpus": (config.runner.num_threads or 1) * ranks, "num_gpus": 0}

    def _uses_gpus(self, config: EngineConfig) -> bool:
        device = config.runner.device
        return device.startswith("cuda") or (device == "auto" and any("GPU" in node for node in self._nodes))


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
