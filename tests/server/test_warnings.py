"""What of a request has no effect is said in a Warning header."""

import asyncio
from typing import Any

import httpx
from fastapi import Request

from quire.server.access import MAX_WARNING_CHARACTERS, MAX_WARNINGS, add_warning
from tests.server.scripted import ScriptedEngine, scripted_app


def _headers(*messages: str) -> httpx.Headers:
    app: Any = scripted_app(ScriptedEngine([]))

    async def answer(request: Request) -> str:
        for message in messages:
            add_warning(request, message)
        return "done"

    app.add_api_route("/warned", answer)

    async def asked() -> httpx.Headers:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get("/warned")).headers

    return asyncio.run(asked())


def test_each_warning_is_a_header_once():
    headers = _headers('the field "a\\b" has no effect', "another", "another")
    assert headers.get_list("warning") == [
        '299 quire "the field \\"a\\\\b\\" has no effect"',
        '299 quire "another"',
    ]
    assert "warning" not in _headers()


def test_warnings_are_bounded_and_fit_a_header():
    headers = _headers("é\r\nSet-Cookie: x" + "y" * 10_000, *map(str, range(100)))
    warnings = headers.get_list("warning")
    assert len(warnings) == MAX_WARNINGS
    assert warnings[0].startswith('299 quire "???Set-Cookie: x')
    assert max(map(len, warnings)) <= MAX_WARNING_CHARACTERS + len('299 quire ""')
    assert "set-cookie" not in headers
