"""Replicas on several machines of a Ray cluster (link/ray_host.py)."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.fleet.places import own_configs, with_threads
from quire.link.channel import Channel
from quire.link.client import EngineClient, unbounded
from quire.link.messages import framed_config
from quire.link.ray_host import LOST, REASON_SECONDS, HostedProcess, join, place
from quire.link.remote import RemoteChannel
from quire.link.supervise import Process, Supervisor
from quire.observe.logs import get_logger

log = get_logger(__name__)


class RaySupervisor(Supervisor):
    """One engine process at a time, each on a machine that Ray chooses."""

    def __init__(
        self, cluster: "RayCluster", config: EngineConfig, index: int, timeout: float, client: EngineClient
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
        self.host, self._nodes = join(address)
        self.rpc_port = rpc_port
        self.supervisor = partial(RaySupervisor, self)
        log.info("ray       %d nodes; engines connect to %s", len(self._nodes), self.host)

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
