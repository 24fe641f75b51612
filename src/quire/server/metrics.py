"""Metrics in Prometheus's text format, under the names that dashboards for other engines use."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from quire.link.client import EngineClient
from quire.link.encoder_client import EncoderClient
from quire.link.messages import AnyReady, Figures, Ready
from quire.observe.counters import Registry

PREFIX = "quire_"
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Engine = EngineClient | EncoderClient
Value = tuple[str, str, float, str]  # kind, name, value, help


class Metrics:
    """What the HTTP side counts by itself. Endpoints call it; `rendered` adds what the engine said last."""

    def __init__(self) -> None:
        registry = self.registry = Registry()
        self._first = registry.histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._gap = registry.histogram("inter_token_latency_seconds", "Between a sequence's tokens.")
        self._whole = registry.histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self._queue = registry.histogram("request_queue_time_seconds", "Waiting to run for the first time.")
        self._prefill = registry.histogram("request_prefill_time_seconds", "From running to the first token.")
        self._decode = registry.histogram("request_decode_time_seconds", "From the first token to the last.")
        self._prompt = registry.counter("prompt_tokens_total", "Prompt tokens of answered requests.")
        self._generated = registry.counter("generation_tokens_total", "Tokens that were generated.")
        self._aborted = registry.counter("requests_disconnected_total", "Requests whose client left.")

    def gap(self, seconds: float, num_tokens: int = 1) -> None:
        self._gap.observe(seconds / num_tokens, num_tokens)

    def first_token(
        self, since_arrival: float, queued: float, prefill: float, num_prompt_tokens: int
    ) -> None:
        self._first.observe(since_arrival)
        self._queue.observe(queued)
        self._prefill.observe(prefill)
        self._prompt.add(num_prompt_tokens)

    def generated(self, num_tokens: int) -> None:
        self._generated.add(num_tokens)

    def finished(self, since_arrival: float, decode: float, reasons: Iterable[str]) -> None:
        self._whole.observe(since_arrival)
        self._decode.observe(decode)
        for reason in reasons:
            help = "Sequences that ended, by reason."
            self.registry.counter("request_success_total", help, finished_reason=reason).add()

    def embedded(self, model: str, num_texts: int, num_tokens: int, since_arrival: float) -> None:
        """By the embedding model's own name."""
        registry, latency = self.registry, "From arrival to the last vector."
        registry.counter("embeddings_total", "Texts that were embedded.", embedding_model=model).add(
            num_texts
        )
        registry.counter("embedding_tokens_total", "Their tokens.", embedding_model=model).add(num_tokens)
        registry.histogram("embedding_request_latency_seconds", latency, embedding_model=model).observe(
            since_arrival
        )

    def disconnected(self) -> None:
        self._aborted.add()

    def refused(self, reason: str) -> None:
        self.registry.counter(
            "requests_refused_total", "Requests that were turned away.", reason=reason
        ).add()

    def http_request(self, path: str, status: int) -> None:
        help = "Responses, by endpoint and status; 499: the client left first."
        self.registry.counter("http_requests_total", help, path=path, status=str(status)).add()

    def rendered(self, engines: Sequence[Engine]) -> bytes:
        """The first engine is the main one: what this side counts goes by its model's name."""
        return generate_latest(_once(_Collector(self.registry, engines)))


class _Collector(Collector):
    def __init__(self, registry: Registry, engines: Sequence[Engine]) -> None:
        self._registry = registry
        self._engines = engines
        self._model = _model_name(engines[0]) if engines else ""

    def collect(self) -> Iterator[Family]:
        for name, metric in self._registry.snapshot().items():
            yield self._counted(name, metric)
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for engine in self._engines:
            for kind, name, value, help in _engine_values(engine):
                if name not in families:
                    family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                    families[name] = family(PREFIX + name, help, labels=["model_name"])
                families[name].add_metric([_model_name(engine)], value)
        yield from families.values()
        for engine in self._engines:
            if isinstance(engine, EngineClient) and engine.adapters.enabled:
                yield _adapter_requests(engine)

    def _counted(self, name: str, metric: dict[str, Any]) -> Family:
        series = metric["series"]
        names = ["model_name", *sorted(series[0]["labels"])]
        families: dict[str, type[Family]] = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        family = families[metric["kind"]](PREFIX + name, metric["help"], labels=names)
        for one in series:
            labels = [self._model, *(one["labels"][label] for label in names[1:])]
            if isinstance(family, HistogramMetricFamily):
                family.add_metric(labels, _buckets(one), one["sum"])
            else:
                family.add_metric(labels, one["value"])
        return family


def _buckets(series: dict[str, Any]) -> list[tuple[str, float]]:
    """Prometheus counts each bucket with all below it."""
    total, buckets = 0, []
    for bound, count in zip([*series["bounds"], "+Inf"], series["counts"], strict=True):
        total += count
        buckets.append((str(bound), float(total)))
    return buckets


def _model_name(engine: Engine) -> str:
    return engine.ready.model if engine.ready is not None else ""


def _engine_values(engine: Engine) -> Iterator[Value]:
    """Counters of the engine's own start anew when it is restarted."""
    yield "gauge", "engine_up", float(engine.is_ready), "Whether the engine can serve."
    yield "counter", "engine_restarts_total", engine.num_restarts, "Engines started after the first."
    yield from _running_values(engine.figures)
    if isinstance(engine, EngineClient):
        yield from _pool_values(engine.figures, engine.ready)
        if engine.adapters.enabled:
            yield from _adapter_values(engine.figures)
    if engine.ready is not None:
        yield from _limits(engine.ready)


def _running_values(figures: Figures) -> Iterator[Value]:
    yield "gauge", "num_requests_running", figures.num_running, "Sequences in the batch."
    yield "gauge", "num_requests_waiting", figures.num_waiting, "Requests in the engine's queue."
    yield "counter", "engine_steps_total", figures.num_steps, "Forward passes."
    yield "counter", "engine_computed_tokens_total", figures.num_computed_tokens, "Tokens through the model."
    yield "counter", "engine_step_seconds_total", figures.step_seconds, "Seconds in forward passes."


def _pool_values(figures: Figures, ready: Ready | None) -> Iterator[Value]:
    used = figures.num_blocks_used / ready.num_blocks if ready is not None else 0.0
    yield "gauge", "kv_cache_usage_perc", used, "Share of the pool's blocks in use, 0 to 1."
    yield "counter", "num_preemptions_total", figures.num_preemptions, "Requests sent back to the queue."
    yield "counter", "prefix_cache_queries_total", figures.prefix_queries, "Tokens looked up."
    yield "counter", "prefix_cache_hits_total", figures.prefix_hits, "Tokens found in the prefix cache."
    yield "counter", "spec_decode_num_drafts_total", figures.num_drafts, "Drafts that were verified."
    yield "counter", "spec_decode_num_draft_tokens_total", figures.num_draft_tokens, "Their tokens."
    yield (
        "counter",
        "spec_decode_num_accepted_tokens_total",
        figures.num_accepted_tokens,
        "Those that stayed.",
    )
    yield from _host_values(figures, ready)
    if ready is not None:
        yield "gauge", "kv_cache_blocks", ready.num_blocks, "Blocks in the pool."
        yield "gauge", "kv_cache_block_size", ready.block_size, "Tokens per block."
        yield "gauge", "kv_cache_bytes", ready.pool_bytes, "Size of the pool."


def _host_values(figures: Figures, ready: Ready | None) -> Iterator[Value]:
    """Host memory beside the pool."""
    size = ready.pool_bytes // (ready.num_blocks + 1) if ready is not None else 0
    yield "counter", "num_swaps_out_total", figures.num_swaps_out, "Requests that went to host memory."
    yield "counter", "num_swaps_in_total", figures.num_swaps_in, "Requests that came back from there."
    yield "counter", "swap_out_bytes_total", figures.swapped_out_blocks * size, "Bytes that went there."
    yield "counter", "swap_in_bytes_total", figures.swapped_in_blocks * size, "Bytes that came back."
    yield "gauge", "swap_bytes", figures.swap_blocks_used * size, "Host memory that swapped requests hold."
    yield "gauge", "swap_space_bytes", figures.swap_blocks * size, "Host memory for swapped requests."
    yield "counter", "kv_offload_saved_blocks_total", figures.offload_saved, "Evicted blocks that were kept."
    yield (
        "counter",
        "kv_offload_dropped_blocks_total",
        figures.offload_dropped,
        "Evicted blocks that were not.",
    )
    yield "counter", "kv_offload_hit_blocks_total", figures.offload_hits, "Blocks that came back to the pool."
    yield (
        "counter",
        "kv_offload_disk_hit_blocks_total",
        figures.offload_disk_hits,
        "Blocks read from the disk.",
    )
    yield "counter", "kv_offload_disk_fault_blocks_total", figures.offload_disk_faults, "Files that failed."
    yield "gauge", "kv_offload_space_bytes", figures.offload_blocks * size, "Host memory for evicted blocks."
    yield "gauge", "kv_offload_bytes", figures.offload_blocks_used * size, "Host memory of evicted blocks."
    yield (
        "gauge",
        "kv_offload_disk_bytes",
        figures.offload_disk_blocks * size,
        "Disk space of evicted blocks.",
    )


def _adapter_values(figures: Figures) -> Iterator[Value]:
    found = figures.adapters
    on_kv = figures.num_blocks_used - found.num_blocks_in_use
    yield "gauge", "pool_blocks_kv", on_kv, "Blocks in use by K and V."
    yield "gauge", "pool_blocks_lora", found.num_blocks, "Blocks that hold adapters, idle ones included."
    yield "gauge", "pool_blocks_lora_in_use", found.num_blocks_in_use, "Blocks of adapters that run now."
    yield "gauge", "lora_adapters_in_pages", found.num_in_pages, "Adapters in the pool."
    yield "gauge", "lora_adapters_running", found.num_in_use, "Adapters that run now."
    yield (
        "gauge",
        "lora_adapters_on_host",
        found.num_on_host,
        "Adapters read from disk and kept in host memory.",
    )
    yield "gauge", "lora_host_bytes", found.host_bytes, "What they take there."
    yield "counter", "lora_reads_total", found.num_reads, "Adapters read from disk."
    yield "counter", "lora_failures_total", found.num_failures, "Adapters that could not be read."
    yield "counter", "lora_loads_total", found.num_loads, "Adapters copied into pages."
    yield "counter", "lora_evictions_total", found.num_evictions, "Idle adapters whose pages were taken."
    yield "counter", "lora_uses_total", found.num_uses, "Sequences that began with an adapter."
    hits = max(0, found.num_uses - found.num_loads) / max(1, found.num_uses)
    yield "gauge", "lora_hit_rate", hits, "Share of uses whose adapter lay in pages already."


def _adapter_requests(engine: EngineClient) -> GaugeMetricFamily:
    """Who runs with what, in labels; the value is the time."""
    labels = ["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    family = GaugeMetricFamily(
        f"{PREFIX}lora_requests_info", "Adapters of running and waiting requests.", labels=labels
    )
    found = engine.figures.adapters
    most = engine.adapters.max_adapters or (engine.ready.max_num_seqs if engine.ready is not None else 0)
    names = [_model_name(engine), str(most), ",".join(found.running), ",".join(found.waiting)]
    family.add_metric(names, time.time())
    return family


def _limits(ready: AnyReady) -> Iterator[Value]:
    yield "gauge", "max_model_len", ready.max_model_len, "Tokens per sequence."
    yield "gauge", "max_num_seqs", ready.max_num_seqs, "Sequences that run at once."
    yield "gauge", "max_num_batched_tokens", ready.max_num_batched_tokens, "Tokens per step."
    yield "gauge", "weights_bytes", ready.weights_bytes, "Size of the weights."
    yield "gauge", "engine_start_seconds", ready.seconds, "How long the engine took to start."


def _once(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
