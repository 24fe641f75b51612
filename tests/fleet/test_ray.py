"""Replicas on several machines through Ray: three nodes of a cluster on this one, of which one is removed."""

import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import yaml

from quire import LLM, SamplingParams
from quire.cli import serve
from quire.cli.main import main
from quire.cli.parser import Parser
from quire.core.config import EngineConfig, ParallelConfig
from quire.core.errors import ConfigError
from quire.server.settings import ServerSettings
from tests.conftest import ROOT
from tests.server.running import RunningServer
from tests.server.test_replicas import OPERATOR, Load, replicas, wait_until

MODULE = "quire.fleet.ray_cluster"
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


def test_without_ray_one_line_says_what_to_install(monkeypatch, capsys) -> None:
    for module in (MODULE, "quire.link.ray_host"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--port", "0", "--data-dir", "none", "-dp", "2", "-dpb", "ray"]) != 0
    said = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(said) == 1
    assert "pip install 'quire[ray]'" in said[0]


def test_a_backend_that_is_not_known_is_named() -> None:
    with pytest.raises(ConfigError, match=r"distributed_executor_backend='k8s'.*mp, ray"):
        EngineConfig.of(distributed_executor_backend="k8s")


def test_settings_that_contradict_each_other_are_named() -> None:
    for wrong, settings in {
        "'k8s': choose mp or ray": {"data_parallel_backend": "k8s"},
        "need data_parallel_backend=ray": {"ray_address": "10.0.0.1:6379"},
        "65535 is outside 0 to 65534": {
            "data_parallel_backend": "ray",
            "data_parallel_size": 2,
            "data_parallel_rpc_port": 65535,
        },
        "needs one HTTP process": {
            "data_parallel_backend": "ray",
            "api_server_count": 2,
        },
    }.items():
        with pytest.raises(ConfigError, match=wrong):
            ServerSettings(**settings)


def test_an_address_without_a_cluster_is_refused_at_once() -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'quire[ray]'")
    from quire.fleet.ray_cluster import RayCluster

    at = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0-OpenSSH")).start()
        with pytest.raises(ConfigError, match=rf"no Ray cluster at {address} \(another server listens there"):
            RayCluster(address)
    with pytest.raises(ConfigError, match=rf"no Ray cluster at {address} .*refused.*--ray-address"):
        RayCluster(address)
    with pytest.raises(ConfigError, match=r"ray_address='ray://10.0.0.1:10001': write HOST:PORT"):
        RayCluster("ray://10.0.0.1:10001")
    assert time.monotonic() - at < 5


def test_each_replica_gets_gpus_or_its_share_of_the_cores() -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'quire[ray]'")
    from quire.fleet.ray_cluster import RayCluster

    def cluster(*nodes: dict[str, float]) -> RayCluster:
        made = object.__new__(RayCluster)
        made._nodes = list(nodes)
        return made

    config = EngineConfig.of(device="auto")
    two = cluster({"CPU": 8.0}, {"CPU": 8.0})
    for count, threads in ((1, 8), (2, 8), (3, 4), (4, 4), (5, 2), (16, 1)):
        configs = two.configs(config, count)
        assert {own.runner.num_threads for own in configs} == {threads}
        assert two.resources(configs[0]) == {"num_cpus": threads, "num_gpus": 0}
    assert two.configs(EngineConfig.of(num_threads=3), 2)[1].runner.num_threads == 3
    with pytest.raises(ConfigError, match=r"data_parallel_size=17 and the 2 nodes .* have 16 cores"):
        two.configs(config, 17)
    gpus = cluster({"CPU": 8.0}, {"CPU": 8.0, "GPU": 4.0})
    assert gpus.resources(gpus.configs(config, 2)[0]) == {"num_cpus": 1, "num_gpus": 1}
    ranks = replace(config, parallel=replace(config.parallel, tensor_parallel_size=2))
    assert gpus.resources(ranks)["num_gpus"] == 2
    spread = replace(
        config, parallel=ParallelConfig(tensor_parallel_size=4, distributed_executor_backend="ray")
    )
    four = cluster(*[{"CPU": 2.0}] * 4)
    for count, threads in ((1, 2), (2, 1)):  # each rank has its place
        assert four.configs(spread, count)[0].runner.num_threads == threads


def test_the_kuberay_example_has_a_cluster_and_a_server_that_joins_it() -> None:
    manifests = yaml.safe_load_all((ROOT / "deploy" / "kuberay.yaml").read_text())
    objects = {one["kind"]: one for one in manifests}
    pod = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    join, start = pod["args"][0].split(" && exec quire serve ")
    assert f"--address={objects['RayCluster']['metadata']['name']}-head-svc:6379" in join
    parser = Parser(prog="quire serve")
    serve.add_arguments(parser)
    settings = serve.server_settings(parser.parse(start.split()))
    assert settings.data_parallel_backend == "ray"
    workers = objects["RayCluster"]["spec"]["workerGroupSpecs"][0]
    assert workers["replicas"] == settings.data_parallel_size + 1  # one may be lost


@pytest.fixture
def cluster():
    pytest.importorskip("ray", reason="needs Ray: pip install 'quire[ray]'")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    yield made
    made.shutdown()


@pytest.mark.slow
def test_a_node_is_removed_under_load_and_its_replica_returns_on_another(cluster) -> None:
    others = [cluster.add_node(**NODE) for _ in range(2)]
    server = RunningServer("-dp", "2", "-dpb", "ray", "--ray-address", cluster.address).wait_ready()
    try:
        nodes = [one["node"] for one in replicas(server)]
        assert len(set(nodes)) == 2  # spread
        expected = _answers(server)
        removed = next(node for node in others if any(node.node_id[:8] in name for name in nodes))
        _removed_under_load(cluster, server, removed, expected)
        _killed(server)
        assert server.post("/restart_replicas", json={}, headers=OPERATOR).status_code == 200
        assert {one["restarts"] for one in replicas(server)} == {2}
        assert _answers(server) == expected
        assert server.wait_idle()["blocks_used"] == 0
        pids = [one["pid"] for one in replicas(server)]
    finally:
        server.process.kill()
        server.process.wait()
    # they end with the server
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 10)


@pytest.mark.slow
def test_ranks_on_several_machines_give_the_tokens_of_one(cluster, monkeypatch) -> None:
    for _ in range(2):
        cluster.add_node(**NODE)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    settings = {
        "num_threads": 1,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_model_len": 256,
        "use_tqdm": False,
    }
    asked = [
        SamplingParams(temperature=0.0, max_tokens=16),
        SamplingParams(max_tokens=16, seed=7, logprobs=1),
    ]
    found = []
    for size, stages in ((1, 1), (2, 1), (2, 2)):
        ranks = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
        with LLM(**settings, **ranks, distributed_executor_backend="ray") as llm:
            results = llm.generate(["One, two,", "The capital of France is"], asked, use_tqdm=False)
            found.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in results])
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_a_node_is_removed_and_its_rank_returns_on_another(cluster) -> None:
    others = [cluster.add_node(**{**NODE, "num_cpus": 2}) for _ in range(2)]  # the head has room for none
    flags = ("-tp", "2", "--num-threads", "2", "--distributed-executor-backend", "ray")
    server = RunningServer(*flags, RAY_ADDRESS=cluster.address).wait_ready()
    try:
        expected = _answers(server)
        line = server.wait_for_line("rank 1 is on node")
        removed = next(node for node in others if node.node_id[:8] in line)
        load = Load(server)
        load.ask(0, 100, stream=True)
        wait_until(lambda: server.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).is_success)
        at = time.monotonic()
        cluster.remove_node(removed, allow_graceful=False)
        server.wait_for_line("rank 1: on node", f"({removed.node_id[:8]})", "starting it again")
        assert time.monotonic() - at < 3.0  # the processes of the node take half a second to end
        load.join()
        assert '"error"' in "".join(load.streams[0][-2:])
        server.wait_for_line("is ready again")
        assert _answers(server) == expected
    finally:
        server.process.kill()
        server.process.wait()


def _answers(server: RunningServer) -> dict[int, str]:
    def ask(number: int) -> str:
        body = {"prompt": f"Number {number}:", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        return server.post("/v1/completions", json=body).json()["choices"][0]["text"]

    with ThreadPoolExecutor(6) as pool:
        return dict(enumerate(pool.map(ask, range(6))))


def _removed_under_load(cluster, server: RunningServer, removed, expected: dict[int, str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(_answers, server)
        load = Load(server)
        for number in range(6, 12):
            load.ask(number, 100, stream=True)
        wait_until(
            lambda: all(one["sequences_running"] >= 4 for one in replicas(server)) and all(load.streams)
        )
        at = time.monotonic()
        cluster.remove_node(removed, allow_graceful=False)
        server.wait_for_line(f"({removed.node_id[:8]})", "not connected any more", "starting it again")
        named = time.monotonic() - at
        assert answers.result() == expected  # those of the node were asked again, elsewhere
    load.join()
    failed = [events for events in load.streams if '"error"' in events[-1] or '"error"' in events[-2]]
    assert 1 <= len(failed) <= 5
    assert all(removed.node_id[:8] in "".join(events[-2:]) for events in failed)
    server.wait_for_line("is ready again")
    assert removed.node_id[:8] not in str(replicas(server))
    assert named < 2.0  # the processes of the node take half a second to end


def _killed(server: RunningServer) -> None:
    """Its machine lives, and says how the process ended."""
    killed = next(one for one in replicas(server) if not one["restarts"])
    os.kill(killed["pid"], signal.SIGKILL)
    server.wait_for_line(f"(pid {killed['pid']})", "was killed by SIGKILL", "starting it again")
    wait_until(lambda: replicas(server)[killed["replica"]]["pid"] not in (None, killed["pid"]))
