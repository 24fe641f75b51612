"""Read a server's Prometheus metrics before and after a request. Start `quire serve` first."""

import os
import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

URL = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000")
NAMES = (
    "quire_num_requests_running",
    "quire_num_requests_waiting",
    "quire_prompt_tokens_total",
    "quire_generation_tokens_total",
    "quire_time_to_first_token_seconds_sum",
    "quire_time_to_first_token_seconds_count",
)


def metrics() -> dict[str, float]:
    """Every sample, summed over its labels."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{URL}/metrics").text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def main() -> None:
    before = metrics()
    body = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    httpx.post(f"{URL}/v1/completions", json=body, timeout=60).raise_for_status()
    time.sleep(0.5)  # counters arrive with the engine's next message
    after = metrics()
    for name in NAMES:
        print(f"{name:42} {after[name]:10.3f}  ({after[name] - before[name]:+.3f})")


if __name__ == "__main__":
    main()
