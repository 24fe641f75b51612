"""`--pin-prefix` over HTTP: usage shows the hit, and an engine that is started again holds it again."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.server.running import RunningServer

RULES = "You answer in one short sentence. " + "Rule: be kind, exact and brief. " * 12


def cached_tokens(server: RunningServer, question: str) -> int:
    answer = server.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "system", "content": RULES}, {"role": "user", "content": question}],
            "max_tokens": 2,
        },
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_first_request_hits_and_so_does_the_first_after_the_engine_died(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    (tmp_path / "system.json").write_text(json.dumps([{"role": "system", "content": RULES}]))
    server = start_server("--pin-prefix", str(tmp_path / "system.json"))
    found = cached_tokens(server, "Why is the sky blue?")
    assert found > 100
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.wait_metric(1, "engine_restarts_total")  # it is noticed
    server.wait_status("/ready", 200)
    assert cached_tokens(server, "What is a quire?") == found
    server.wait_idle(blocks_used=found // 16)  # held, and counted as such
