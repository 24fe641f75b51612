"""Writes the Grafana dashboard and the Prometheus alert rules from the metrics that a server and a router export.

Kind and help text of a metric decide its query and its description: counters are shown as rates, gauges as they are,
histograms as percentiles. A metric that is neither in PANELS nor in NOT_SHOWN fails a test.

Usage: PYTHONPATH=src python tools/dashboard.py.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from quire.core.config import EngineConfig
from quire.core.request import QueueBounds
from quire.core.sampling import SamplingParams
from quire.core.stats import PoolSize, RoutingStats, StartStats
from quire.engine.validation import Limits
from quire.fleet.proxy import SERVER_UP
from quire.link.client import EngineClient
from quire.link.messages import Described, Ready
from quire.server.metrics import PREFIX, Metrics
from quire.server.stored import ObjectStore

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "quire.json"
RULES = DEPLOY / "prometheus" / "rules.yaml"

SCOPE = 'model_name=~"$model", instance=~"$instance"'
REQUESTS = 'path!~"/health|/ready|/metrics"'  # a probe gets 503 while a model loads, which is no error
PERCENTILES = (0.5, 0.9, 0.99)
RATIOS = ("_perc", "_rate", "_start_seconds")  # gauges whose sum means nothing
UNITS = {"_bytes": "bytes", "_seconds": "s", "_perc": "percentunit", "_rate": "percentunit"}


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    # metrics without prefix, or "legend = formula" of rate(metric) and increase(metric)
    queries: tuple[str, ...]
    by: str = ""  # the label that separates the lines
    where: str = ""  # further label matchers
    unit: str = ""  # Grafana's; "" takes it from the name of the first metric


# A row of panels begins with its name. Panel: title | queries, with ; between | fields of Panel
PANELS = f"""
Traffic
  Engines up | engine_up | by=model_name
  Tokens per second | prompt_tokens_total; generation_tokens_total
  Responses per second, by status | http_requests_total | by=status | where={REQUESTS}
  Sequences that ended, by reason | request_success_total | by=finished_reason
  Embeddings per second | embeddings_total | by=embedding_model
  Embedding tokens per second | embedding_tokens_total | by=embedding_model
Latency
  Time to first token | time_to_first_token_seconds
  Inter-token latency | inter_token_latency_seconds
  Whole request | e2e_request_latency_seconds
  Time in the queue | request_queue_time_seconds
  Prefill | request_prefill_time_seconds
  Decode | request_decode_time_seconds
  Embedding request | embedding_request_latency_seconds
Queue
  Running and waiting | num_requests_running; num_requests_waiting; max_num_seqs
  Refused per second, by reason | requests_refused_total | by=reason
  Clients that left, per second | requests_disconnected_total
KV cache
  Pool in use | kv_cache_usage_perc | by=model_name
  Prefix cache hit rate | hits = rate(prefix_cache_hits_total) / rate(prefix_cache_queries_total) | unit=percentunit
  Preemptions and swaps per second | num_preemptions_total; num_swaps_out_total; num_swaps_in_total
  Swap traffic | swap_out_bytes_total; swap_in_bytes_total
  Host memory | swap_bytes; swap_space_bytes; kv_offload_bytes; kv_offload_space_bytes
  Disk | kv_offload_disk_bytes
  KV offload: blocks kept and dropped | kv_offload_saved_blocks_total; kv_offload_dropped_blocks_total
  KV offload: blocks that came back | kv_offload_hit_blocks_total; kv_offload_disk_hit_blocks_total
  KV offload: files that failed | kv_offload_disk_fault_blocks_total
Engine
  Steps per second | engine_steps_total | by=model_name
  Mean step | step = rate(engine_step_seconds_total) / rate(engine_steps_total) | unit=s
  Tokens through the model per second | engine_computed_tokens_total | by=model_name
  Drafts and accepted tokens | spec_decode_num_draft_tokens_total; spec_decode_num_accepted_tokens_total
  Weights and KV pool | weights_bytes; kv_cache_bytes
  Stored responses | stored_responses_bytes
Errors
  Responses with status 5xx per second, by path | http_requests_total | by=path | where={REQUESTS}, status=~"5.."
  Engine restarts in an hour | restarts = increase(engine_restarts_total)
  Engine start | engine_start_seconds | by=model_name
Adapters
  Adapters | lora_adapters_running; lora_adapters_in_pages; lora_adapters_on_host
  Blocks of the pool | pool_blocks_kv; pool_blocks_lora; pool_blocks_lora_in_use
  Adapter hit rate | lora_hit_rate | by=model_name
  Loads and evictions per second | lora_uses_total; lora_loads_total; lora_evictions_total
  Reads from disk per second | lora_reads_total; lora_failures_total
  Host copies | lora_host_bytes
Replicas and servers
  Requests per second, by replica | replica_requests_total | by=replica, server
  Open requests, by replica | replica_requests_open | by=replica, server
  Prompt tokens handed over per second, by replica | replica_handed_over_tokens_total | by=replica, server
  Pending prompt tokens, by replica | replica_pending_tokens | by=replica, server
  Servers behind the router | server_up | by=server
"""

NOT_SHOWN = {
    "max_model_len": "a setting",
    "max_num_batched_tokens": "a setting",
    "kv_cache_blocks": "a setting; kv_cache_bytes is shown",
    "kv_cache_block_size": "a setting",
    "engine_sms": "a setting",
    "stored_responses": "stored_responses_bytes is shown",
    "spec_decode_num_drafts_total": "their tokens are shown",
    "lora_requests_info": "names of adapters in labels, for routers",
}

# name | severity | how long it holds before it fires | summary, then the expression in lines of its own
ALERTS = f"""
QuireEngineDown | critical | 5m | An engine of {{{{ $labels.model_name }}}}, {{{{ $labels.instance }}}}, does not serve.
  min by (instance, model_name, replica) (quire_engine_up) == 0
QuireQueueFull | warning | 1m | The queue of {{{{ $labels.instance }}}} is full: requests get status 429.
  sum by (instance, model_name) (rate(quire_requests_refused_total{{reason="queue_full"}}[5m])) > 0
QuireSlowFirstToken | warning | 10m | Time to first token on {{{{ $labels.instance }}}}: p99 is {{{{ $value }}}} s.
  histogram_quantile(0.99,
  sum by (instance, model_name, le) (rate(quire_time_to_first_token_seconds_bucket[5m]))) > 10
QuirePreemptions | warning | 10m | {{{{ $labels.instance }}}} preempts requests: its KV pool is too small.
  sum by (instance, model_name) (rate(quire_num_preemptions_total[5m])) > 0.1
QuirePoolFull | warning | 10m | More than 95 % of the KV pool of {{{{ $labels.model_name }}}} is in use.
  max by (instance, model_name) (quire_kv_cache_usage_perc) > 0.95
QuireEngineRestarts | critical | 0m | An engine of {{{{ $labels.instance }}}} was restarted: see its log.
  sum by (instance, model_name) (increase(quire_engine_restarts_total[15m])) > 0
QuireServerErrors | critical | 5m | More than 1 % of the responses of {{{{ $labels.instance }}}} are 5xx.
  sum by (instance, model_name) (rate(quire_http_requests_total{{{REQUESTS}, status=~"5.."}}[5m]))
  / sum by (instance, model_name) (rate(quire_http_requests_total{{{REQUESTS}}}[5m])) > 0.01
"""


def rows() -> dict[str, list[Panel]]:
    """PANELS, by row."""
    by_row: dict[str, list[Panel]] = {}
    for line in PANELS.strip().splitlines():
        if not line.startswith(" "):
            by_row[line] = []
            continue
        title, queries, *fields = line.strip().split(" | ")
        options = dict(field.split("=", 1) for field in fields)
        by_row[list(by_row)[-1]].append(Panel(title, tuple(queries.split("; ")), **options))
    return by_row


def registered() -> dict[str, Family]:
    """Every metric of a server with adapters and replicas and of a router, by its name without the prefix."""
    metrics = Metrics()
    ObjectStore(1, 1, registry=metrics.registry)
    engine = EngineClient(EngineConfig.of(enable_lora=True), QueueBounds(1))
    engine.routing = RoutingStats()
    size = PoolSize(num_blocks=1, block_size=16, num_bytes=2)
    start = StartStats(num_threads=1, weights_bytes=1, seconds=0.0)
    described = Described(None, {}, {})
    engine.ready = Ready("model", 1, described, SamplingParams(), Limits(1, 1, 1), start, [], size)
    rendered = text_string_to_metric_families(metrics.rendered([engine]).decode())
    # a metric with labels is not rendered before its first value, so the HTTP side's are read from its registry
    up = Family(PREFIX + SERVER_UP.name, SERVER_UP.help, SERVER_UP.kind)
    families = [*metrics.registry.collect(), *rendered, up]
    return {
        family.name.removeprefix(PREFIX) + "_total" * (family.type == "counter"): family
        for family in families
    }


def names(query: str) -> list[str]:
    """The metrics of a query of a panel."""
    return re.findall(r"(?:rate|increase)\((\w+)\)", query) or [query]


def targets(panel: Panel, known: dict[str, Family]) -> Iterator[tuple[str, str]]:
    """(expression, legend) of each line, or each group of lines, of a panel."""
    inside = "{" + (f"{SCOPE}, {panel.where}" if panel.where else SCOPE) + "}"
    group = f"by ({panel.by}) " if panel.by else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in panel.by.split(", ")) if panel.by else ""
    for query in panel.queries:
        series = f"{PREFIX}{query}{inside}"
        if " = " in query:
            name, _, formula = query.partition(" = ")
            formula = re.sub(
                r"rate\((\w+)\)", rf"sum {group}(rate({PREFIX}\1{inside}[$__rate_interval]))", formula
            )
            yield (
                re.sub(r"increase\((\w+)\)", rf"sum {group}(increase({PREFIX}\1{inside}[1h]))", formula),
                name,
            )
        elif known[query].type == "histogram":
            rate = f"sum by (le) (rate({PREFIX}{query}_bucket{inside}[$__rate_interval]))"
            for share in PERCENTILES:
                yield f"histogram_quantile({share}, {rate})", f"p{share * 100:.0f}"
        elif known[query].type == "counter":
            yield f"sum {group}(rate({series}[$__rate_interval]))", legend or query.removesuffix("_total")
        else:
            yield f"{'max' if query.endswith(RATIOS) else 'sum'} {group}({series})", legend or query


def unit_of(panel: Panel, known: dict[str, Family]) -> str:
    name = panel.queries[0].removesuffix("_total")
    unit = panel.unit or next((unit for end, unit in UNITS.items() if name.endswith(end)), "short")
    is_rate = unit == "bytes" and known[panel.queries[0]].type == "counter"
    return "Bps" if is_rate else unit


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it: rows of three panels."""
    known = registered()
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels: list[dict[str, Any]] = []
    top = 0
    for row, inside in rows().items():
        place = {"h": 1, "w": 24, "x": 0, "y": top}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row, "gridPos": place, "panels": []})
        for index, panel in enumerate(inside):
            metrics = dict.fromkeys(name for query in panel.queries for name in names(query))
            panels.append(
                {
                    "id": len(panels) + 1,
                    "type": "timeseries",
                    "title": panel.title,
                    "description": "\n".join(
                        f"{PREFIX}{name}: {known[name].documentation}" for name in metrics
                    ),
                    "datasource": source,
                    "gridPos": {"h": 7, "w": 8, "x": index % 3 * 8, "y": top + 1 + index // 3 * 7},
                    "fieldConfig": {"defaults": {"unit": unit_of(panel, known), "min": 0}, "overrides": []},
                    "targets": [
                        {"refId": chr(ord("A") + number), "expr": expr, "legendFormat": legend}
                        for number, (expr, legend) in enumerate(targets(panel, known))
                    ],
                }
            )
        top += 1 + -(-len(inside) // 3) * 7
    variables: list[dict[str, Any]] = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    for name, label in (("model", "model_name"), ("instance", "instance")):
        variables.append(
            {
                "name": name,
                "type": "query",
                "datasource": source,
                "query": f"label_values({PREFIX}engine_up, {label})",
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return {
        "uid": "quire",
        "title": "Quire",
        "tags": ["quire", "llm"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def rules() -> dict[str, Any]:
    """The alert rules as Prometheus reads them."""
    entries: list[dict[str, Any]] = []
    for head, *expr in (alert.splitlines() for alert in re.split(r"\n(?=\S)", ALERTS.strip())):
        name, severity, holds, summary = head.split(" | ")
        entries.append(
            {
                "alert": name,
                "expr": " ".join(line.strip() for line in expr),
                "for": holds,
                "labels": {"severity": severity},
                "annotations": {"summary": summary},
            }
        )
    return {"groups": [{"name": "quire", "rules": entries}]}


def files() -> dict[Path, str]:
    """The text of each file that this tool writes."""
    head = "# Written by tools/dashboard.py: change it there, then run it.\n"
    return {
        DASHBOARD: json.dumps(dashboard(), indent=1) + "\n",
        RULES: head + yaml.safe_dump(rules(), sort_keys=False, width=1000),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
