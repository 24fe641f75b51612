"""A server of a quantized checkpoint: an AWQ folder as auto-round wrote it."""

from collections.abc import Callable
from pathlib import Path

from tests.server.running import RunningServer

AWQ = Path(__file__).parents[1] / "data" / "quantized" / "awq"


def test_an_awq_folder_is_served_in_its_own_numbers(start_server: Callable[..., RunningServer]) -> None:
    server = start_server("--model", str(AWQ), "--served-model-name", "tiny")
    question = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    first, again = (server.client().chat.completions.create(**question, temperature=0) for _ in range(2))
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.usage is not None
    assert first.usage.completion_tokens > 0
    started = "\n".join(server.lines)
    assert "checkpoint on cpu" in started
    assert "attention 4.38 (int4-g64z)" in started
