"""Metrics in Prometheus's text format, under the names that dashboards for other engines use."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from quire.core import stats
from quire.link.client import EngineClient

PREFIX = "quire_"
# Upper bounds in seconds: from one decode step to a long queue.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The HTTP side's own metrics. Endpoints call it; `rendered` adds the engines' statistics."""

    def __init__(self) -> None:
        self.last_used = 0.0  # when the last request ended that was no probe
        self.registry = CollectorRegistry()  # other parts of the server may add metrics of their own
        self.elsewhere: Mapping[str, bytes] = {}  # `counts` of other HTTP processes, by process
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._gap = _TokenHistogram("inter_token_latency_seconds", "Between a sequence's tokens.")
        self.registry.register(self._gap)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self._queue = self._histogram("request_queue_time_seconds", "Waiting to run for the first time.")
        self._prefill = self._histogram("request_prefill_time_seconds", "From running to the first token.")
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.")
        self._prompt = self._counter("prompt_tokens_total", "Prompt tokens of answered requests.")
        self._generated = self._counter("generation_tokens_total", "Tokens that were generated.")
        self._aborted = self._counter("requests_disconnected_total", "Requests whose client left.")
        self._ended = self._counter(
            "request_success_total", "Sequences that ended, by reason.", "finished_reason"
        )
        self._texts = self._counter("embeddings_total", "Texts that were embedded.", "embedding_model")
        self._text_tokens = self._counter("embedding_tokens_total", "Their tokens.", "embedding_model")
        self._embedding = self._histogram(
            "embedding_request_latency_seconds", "From arrival to the last vector.", "embedding_model"
        )
        self._refused = self._counter("requests_refused_total", "Requests that were turned away.", "reason")
        self._http = self._counter(
            "http_requests_total",
            "Responses, by endpoint and status; 499: the client left first.",
            *("path", "status"),
        )

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, *labels: str) -> Histogram:
        return Histogram(PREFIX + name, help, labels, buckets=SECONDS, registry=self.registry)

    def gap(self, seconds: float, num_tokens: int = 1) -> None:
        self._gap.observe(seconds / num_tokens, num_tokens)

    def first_token(
        self, since_arrival: float, queued: float, prefill: float, num_prompt_tokens: int
    ) -> None:
        self._first.observe(since_arrival)
        self._queue.observe(queued)
        self._prefill.observe(prefill)
        self._prompt.inc(num_prompt_tokens)

    def generated(self, num_tokens: int) -> None:
        self._generated.inc(num_tokens)

    def finished(self, since_arrival: float, decode: float, reasons: Iterable[str]) -> None:
        self._whole.observe(since_arrival)
        self._decode.observe(decode)
        for reason in reasons:
            self._ended.labels(reason).inc()

    def embedded(self, model: str, num_texts: int, num_tokens: int, since_arrival: float) -> None:
        """By the embedding model's own name."""
        self._texts.labels(model).inc(num_texts)
        self._text_tokens.labels(model).inc(num_tokens)
        self._embedding.labels(model).observe(since_arrival)

    def disconnected(self) -> None:
        self._aborted.inc()

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def http_request(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def rendered(self, engines: Sequence[EngineClient]) -> bytes:
        """The first engine is the main one: the HTTP side's own metrics go by its model's name."""
        registry = CollectorRegistry()
        registry.register(_AllMetrics(self._own(), engines))
        return generate_latest(registry)

    def counts(self) -> bytes:
        """This process's own metrics, for `elsewhere` of another."""
        families = [
            (
                family.name,
                family.documentation,
                family.type,
                [(sample.name, dict(sample.labels), sample.value) for sample in family.samples],
            )
            for family in self.registry.collect()
        ]
        return msgspec.msgpack.encode(families)

    def _own(self) -> Iterator[Family]:
        """Of all HTTP processes together."""
        if not self.elsewhere:
            yield from self.registry.collect()
            return
        families: dict[str, Family] = {}
        sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for data in (self.counts(), *self.elsewhere.values()):
            for name, documentation, kind, samples in msgspec.msgpack.decode(data):
                families.setdefault(name, Family(name, documentation, kind))
                values = sums.setdefault(name, {})
                for sample, labels, value in samples:
                    key = (sample, tuple(labels.items()))
                    values[key] = values.get(key, 0.0) + value
        for name, family in families.items():
            for (sample, labels), value in sums[name].items():
                family.add_sample(sample, dict(labels), value)
            yield family


class _TokenHistogram(Collector):
    """A histogram for the per-token path, for one thread: prometheus_client's own takes three locks per value."""

    def __init__(self, name: str, help: str) -> None:
        self._name = PREFIX + name
        self._help = help
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int) -> None:
        self._counts[bisect_left(SECONDS, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Family]:
        bounds = [*map(str, SECONDS), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], buckets, self._sum)
        yield family


class _AllMetrics(Collector):
    """The HTTP side's metrics and the engines' statistics, all with the label `model_name`."""

    def __init__(self, own: Iterable[Family], engines: Sequence[EngineClient]) -> None:
        self._own = own
        self._engines = engines

    def collect(self) -> Iterator[Family]:
        model = _model_name(self._engines[0]) if self._engines else ""
        for family in self._own:
            family.samples = [
                sample._replace(labels={**sample.labels, "model_name": model})
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            if family.samples:
                yield family
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for engine in self._engines:
            labels = _labels(engine)
            for metric, value in _engine_metrics(engine):
                if metric.name not in families:
                    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                    families[metric.name] = kind(PREFIX + metric.name, metric.help)
                family = families[metric.name]
                family.add_sample(family.name + "_total" * (metric.kind == "counter"), labels, value)
        yield from families.values()
        with_adapters = [engine for engine in self._engines if engine.adapters.enabled]
        if with_adapters:
            yield _adapter_info(with_adapters)


def _model_name(engine: EngineClient) -> str:
    return engine.ready.model if engine.ready is not None else ""


def _labels(engine: EngineClient) -> dict[str, str]:
    """A model's replicas have a label of their own: sums over it are the model's."""
    labels = {"model_name": _model_name(engine)}
    return labels if engine.replica is None else {**labels, "replica": str(engine.replica)}


_UP = stats.Metric("gauge", "engine_up", "Whether the engine can serve.")
_RESTARTS = stats.Metric("counter", "engine_restarts_total", "Engines started after the first.")


def _engine_metrics(engine: EngineClient) -> Iterator[tuple[stats.Metric, float]]:
    """Counters of the engine process start at zero when it is restarted."""
    yield _UP, float(engine.is_ready)
    yield _RESTARTS, engine.num_restarts
    if engine.routing is not None:
        yield from stats.walk(engine.routing)
    ready = engine.ready
    records: list[Any] = [engine.queue, engine.stats]
    block_bytes = 0
    if ready is not None:
        records += [ready.limits, ready.start]
        if ready.pool is not None:
            records.append(ready.pool)
            block_bytes = ready.pool.block_bytes
        if ready.vectors is not None:  # of the engine's records an encoder fills in the first only
            records[1] = engine.stats.steps
    if engine.adapters.enabled and engine.stats.adapters is None:
        records.append(stats.AdapterStats())
    for record in records:
        for metric, value in stats.walk(record):
            yield metric, value * block_bytes if metric.in_bytes else value


def _adapter_info(engines: Sequence[EngineClient]) -> GaugeMetricFamily:
    """The adapters that requests use, as labels; the value is the time."""
    family = GaugeMetricFamily(f"{PREFIX}lora_requests_info", "Adapters of running and waiting requests.")
    for engine in engines:
        adapters = engine.stats.adapters or stats.AdapterStats()
        max_adapters = engine.adapters.max_adapters or (
            engine.ready.max_num_seqs if engine.ready is not None else 0
        )
        labels = {
            **_labels(engine),
            "max_lora": str(max_adapters),
            "running_lora_adapters": ",".join(adapters.running),
            "waiting_lora_adapters": ",".join(adapters.waiting),
        }
        family.add_sample(family.name, labels, time.time())
    return family
