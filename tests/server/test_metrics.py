"""/metrics: names, types, labels and help texts are an interface; dashboards depend on each of them."""

import re

import pytest

from quire.core.config import EngineConfig
from quire.core.request import QueueBounds
from quire.core.sampling import SamplingParams
from quire.core.stats import (
    AdapterStats,
    EngineStats,
    OffloadStats,
    PoolSize,
    PoolStats,
    QueueStats,
    StartStats,
    SwapStats,
    VectorFormat,
    walk,
)
from quire.engine.validation import Limits
from quire.link.client import EngineClient
from quire.link.messages import Described, Ready
from quire.server.metrics import Metrics
from quire.server.stored import ObjectStore

# name | type | labels beside model_name | help
HTTP = """
time_to_first_token_seconds | histogram |  | From arrival to the first token.
inter_token_latency_seconds | histogram |  | Between a sequence's tokens.
e2e_request_latency_seconds | histogram |  | From arrival to the last token.
request_queue_time_seconds | histogram |  | Waiting to run for the first time.
request_prefill_time_seconds | histogram |  | From running to the first token.
request_decode_time_seconds | histogram |  | From the first token to the last.
prompt_tokens_total | counter |  | Prompt tokens of answered requests.
generation_tokens_total | counter |  | Tokens that were generated.
requests_disconnected_total | counter |  | Requests whose client left.
stored_responses | gauge |  | Responses, chat completions and conversations that are kept in memory.
stored_responses_bytes | gauge |  | Their size.
request_success_total | counter | finished_reason | Sequences that ended, by reason.
embeddings_total | counter | embedding_model | Texts that were embedded.
embedding_tokens_total | counter | embedding_model | Their tokens.
embedding_request_latency_seconds | histogram | embedding_model | From arrival to the last vector.
requests_refused_total | counter | reason | Requests that were turned away.
http_requests_total | counter | path,status | Responses, by endpoint and status; 499: the client left first.
"""
EVERY_ENGINE = """
engine_up | gauge |  | Whether the engine can serve.
engine_restarts_total | counter |  | Engines started after the first.
num_requests_running | gauge |  | Sequences in the batch.
num_requests_waiting | gauge |  | Requests in the engine's queue.
engine_steps_total | counter |  | Forward passes.
engine_computed_tokens_total | counter |  | Tokens through the model.
engine_step_seconds_total | counter |  | Seconds in forward passes.
max_model_len | gauge |  | Tokens per sequence.
max_num_seqs | gauge |  | Sequences that run at once.
max_num_batched_tokens | gauge |  | Tokens per step.
weights_bytes | gauge |  | Size of the weights.
engine_start_seconds | gauge |  | How long the engine took to start.
engine_sms | gauge |  | SMs of its GPU that the engine may use; 0 on a CPU.
"""
GENERATING = """
kv_cache_usage_perc | gauge |  | Share of the pool's blocks in use, 0 to 1.
num_preemptions_total | counter |  | Requests sent back to the queue.
prefix_cache_queries_total | counter |  | Tokens looked up.
prefix_cache_hits_total | counter |  | Tokens found in the prefix cache.
spec_decode_num_drafts_total | counter |  | Drafts that were verified.
spec_decode_num_draft_tokens_total | counter |  | Their tokens.
spec_decode_num_accepted_tokens_total | counter |  | Draft tokens that were accepted.
num_swaps_out_total | counter |  | Requests that went to host memory.
num_swaps_in_total | counter |  | Requests that came back from there.
swap_out_bytes_total | counter |  | Bytes that went there.
swap_in_bytes_total | counter |  | Bytes that came back.
swap_bytes | gauge |  | Host memory that swapped requests hold.
swap_space_bytes | gauge |  | Host memory for swapped requests.
kv_offload_saved_blocks_total | counter |  | Evicted blocks that were kept.
kv_offload_dropped_blocks_total | counter |  | Evicted blocks that were not.
kv_offload_hit_blocks_total | counter |  | Blocks that came back to the pool.
kv_offload_disk_hit_blocks_total | counter |  | Blocks read from the disk.
kv_offload_disk_fault_blocks_total | counter |  | Files that failed.
kv_offload_space_bytes | gauge |  | Host memory for evicted blocks.
kv_offload_bytes | gauge |  | Host memory of evicted blocks.
kv_offload_disk_bytes | gauge |  | Disk space of evicted blocks.
kv_cache_blocks | gauge |  | Blocks in the pool.
kv_cache_block_size | gauge |  | Tokens per block.
kv_cache_bytes | gauge |  | Size of the pool.
"""
ADAPTERS = """
pool_blocks_kv | gauge |  | Blocks in use by K and V.
pool_blocks_lora | gauge |  | Blocks that hold adapters, idle ones included.
pool_blocks_lora_in_use | gauge |  | Blocks of adapters that run now.
lora_adapters_in_pages | gauge |  | Adapters in the pool.
lora_adapters_running | gauge |  | Adapters that run now.
lora_adapters_on_host | gauge |  | Adapters read from disk and kept in host memory.
lora_host_bytes | gauge |  | What they take there.
lora_reads_total | counter |  | Adapters read from disk.
lora_failures_total | counter |  | Adapters that could not be read.
lora_loads_total | counter |  | Adapters copied into pages.
lora_evictions_total | counter |  | Idle adapters whose pages were taken.
lora_uses_total | counter |  | Sequences that began with an adapter.
lora_hit_rate | gauge |  | Share of uses whose adapter lay in pages already.
lora_requests_info | gauge | max_lora,running_lora_adapters,waiting_lora_adapters | \
Adapters of running and waiting requests.
"""
START = StartStats(num_threads=2, weights_bytes=1000, seconds=0.5)
DESCRIBED = Described(None, {}, {})


def exposed(text: str) -> set[str]:
    """The lines of the lists above that a rendering has."""
    helps = dict(re.findall(r"^# HELP quire_(\S+) (.*)$", text, re.M))
    types = dict(re.findall(r"^# TYPE quire_(\S+) (.*)$", text, re.M))
    labels: dict[str, str] = {}
    for name, inside in re.findall(r"^quire_(\w+)\{(.*)\} \S+$", text, re.M):
        family = name if name in types else re.sub("_(bucket|count|sum)$", "", name)
        names = set(re.findall(r'(\w+)="', inside)) - {"le"}
        assert "model_name" in names
        labels[family] = ",".join(sorted(names - {"model_name"}))
    return {f"{name} | {types[name]} | {labels[name]} | {helps[name]}" for name in types}


def lines(*lists: str) -> set[str]:
    return {line for each in lists for line in each.strip().splitlines()}


def generating(**settings: bool) -> EngineClient:
    client = EngineClient(EngineConfig.of(**settings), QueueBounds(1))
    size = PoolSize(num_blocks=9, block_size=16, num_bytes=1000)
    client.ready = Ready("m", 1, DESCRIBED, SamplingParams(), Limits(100, 64, 8), START, [], size)
    return client


def encoder() -> EngineClient:
    client = EngineClient(EngineConfig(), QueueBounds(1))
    vectors = VectorFormat(3, True)
    client.ready = Ready("e", 1, DESCRIBED, SamplingParams(), Limits(100, 64, 8), START, [], None, vectors)
    return client


@pytest.fixture
def metrics() -> Metrics:
    """With every metric of the HTTP side used once."""
    metrics = Metrics()
    ObjectStore(1, 1, registry=metrics.registry)
    metrics.first_token(0.5, 0.1, 0.2, 7)
    metrics.gap(0.03, 3)
    metrics.generated(3)
    metrics.finished(2.0, 1.5, ["stop"])
    metrics.embedded("e", 1, 2, 0.1)
    metrics.disconnected()
    metrics.refused("queue_full")
    metrics.http_request("/v1/models", 200)
    return metrics


def test_every_metric_keeps_its_name_type_labels_and_help(metrics: Metrics):
    text = metrics.rendered([generating(enable_lora=True), encoder()]).decode()
    assert exposed(text) == lines(HTTP, EVERY_ENGINE, GENERATING, ADAPTERS)


def test_an_engine_exposes_what_it_has(metrics: Metrics):
    assert exposed(metrics.rendered([generating()]).decode()) == lines(HTTP, EVERY_ENGINE, GENERATING)
    assert exposed(metrics.rendered([encoder()]).decode()) == lines(HTTP, EVERY_ENGINE)


def test_labelled_metrics_appear_with_their_first_value():
    names = {line.split(" ")[0] for line in exposed(Metrics().rendered([]).decode())}
    assert {"generation_tokens_total", "time_to_first_token_seconds"} <= names
    assert not names & {"request_success_total", "embeddings_total", "http_requests_total"}


def test_values_come_from_the_tree_and_blocks_are_shown_as_bytes(metrics: Metrics):
    client = generating(enable_lora=True)
    client.queue = QueueStats(num_running=3, num_waiting=2)
    client.stats = EngineStats(
        pool=PoolStats(num_blocks_used=4, usage=0.5, offload_disk=3),
        swap=SwapStats(blocks_out=2),
        offload=OffloadStats(saved=7),
        adapters=AdapterStats(num_reads=6, running=("a", "b")),
    )
    text = metrics.rendered([client]).decode()
    for line in (
        'quire_num_requests_running{model_name="m"} 3.0',
        'quire_kv_cache_usage_perc{model_name="m"} 0.5',
        'quire_swap_out_bytes_total{model_name="m"} 200.0',
        'quire_kv_offload_disk_bytes{model_name="m"} 300.0',
        'quire_kv_offload_saved_blocks_total{model_name="m"} 7.0',
        'quire_lora_reads_total{model_name="m"} 6.0',
        'quire_max_model_len{model_name="m"} 64.0',
        'quire_weights_bytes{model_name="m"} 1000.0',
    ):
        assert line in text.splitlines()
    assert 'running_lora_adapters="a,b"' in text


def test_a_bound_belongs_to_its_own_bucket_and_the_rest_lies_above(metrics: Metrics):
    for seconds in (0.1, 0.1001, 500.0):
        metrics.first_token(seconds, 0.0, 0.0, 0)
    text = metrics.rendered([]).decode()
    for bound, count in (("0.05", 0), ("0.1", 1), ("0.25", 2), ("0.5", 3), ("120.0", 3), ("+Inf", 4)):
        assert f'quire_time_to_first_token_seconds_bucket{{le="{bound}",model_name=""}} {count}.0' in text


def test_gaps_between_tokens_are_counted_per_token():
    metrics = Metrics()
    metrics.gap(0.03, 3)
    metrics.gap(0.011)
    metrics.gap(1000.0)
    text = metrics.rendered([]).decode()
    name = "quire_inter_token_latency_seconds"
    for bound, count in (("0.005", 0), ("0.01", 3), ("0.025", 4), ("120.0", 4), ("+Inf", 5)):
        assert f'{name}_bucket{{le="{bound}",model_name=""}} {count}.0' in text
    assert f'{name}_count{{model_name=""}} 5.0' in text
    assert f'{name}_sum{{model_name=""}} 1000.041' in text


def test_no_two_fields_of_the_tree_share_a_name():
    names = [metric.name for metric, _ in walk(EngineStats(adapters=AdapterStats()))]
    assert len(names) == len(set(names))
