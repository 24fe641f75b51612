"""A chat template that a stranger sent: whatever it does, it costs its own request and no more than its time."""

import asyncio
import re

import pytest

from quire.core.errors import InvalidRequest
from quire.server import request_templates
from quire.server.errors import ApiError
from quire.server.request_templates import Rendering, RequestTemplates

HI = [{"role": "user", "content": "Hi"}]
SPECIAL = {"bos_token": "<s>"}
LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}{% set x = 1 %}{% endfor %}{% endfor %}"
HARMFUL = {
    "a range past the sandbox's": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "nested loops": (LOOP, "longer than 1 s"),
    "one endless operation": ("{{ 10 ** (10 ** 10) }}", "longer than 1 s"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "a giant string": ("{{ 'a' * 10**9 }}", "memory|longer"),
    "a string past all memory": ("{{ 'a' * 10**15 }}", "memory|longer"),
    "a filter that pads": ("{{ 'a' | center(10**9) }}", "memory|longer"),
    "a format that pads": ("{{ '%1000000000d' | format(1) }}", "memory|longer"),
    "doubling": (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "memory|longer",
    ),
    "many small pieces": ("{% for i in range(90000) %}{{ 'some' * 100 }}{% endfor %}", "characters|longer"),
    "deep nesting": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "chat template"),
    "no jinja": ("{% for %}", "no valid jinja"),
    "its own complaint": ("{{ raise_exception('no') }}", "no"),
    "a way out": ("{{ ''.__class__.__mro__ }}", "unsafe"),
}


def test_templates_that_hang_swell_or_crash_are_refused_with_the_reason_and_honest_ones_go_on() -> None:
    async def run() -> dict[str, str]:
        hasty, templates = (
            RequestTemplates(seconds=1.0),
            RequestTemplates(seconds=60.0),
        )  # a machine may be busy
        said = {}
        try:
            for name, (text, reason) in HARMFUL.items():
                chosen = hasty if "longer" in reason else templates
                with pytest.raises(InvalidRequest) as caught:
                    await chosen.render(Rendering(text, SPECIAL, HI))
                said[name] = str(caught.value)
                assert len(said[name]) < 500
            honest = Rendering(
                "{{ bos_token }}{{ messages[0].content }} {{ x }}", SPECIAL, HI, variables={"x": 1}
            )
            assert await templates.render(honest) == "<s>Hi 1"
            kept = list(templates._idle)
            for _ in range(20):
                await templates.render(honest)
            assert templates._idle == kept  # the same worker every time
        finally:
            await hasty.close()
            await templates.close()
        return said

    said = asyncio.run(run())
    for name, (_, reason) in HARMFUL.items():
        assert re.search(reason, said[name]), (name, said[name])


def test_those_who_wait_behind_slow_templates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_templates, "MAX_WAITING", 1)

    async def run() -> list[object]:
        templates = RequestTemplates(seconds=1.0)
        try:
            asks = (templates.render(Rendering(LOOP, {}, HI)) for _ in range(5))
            return await asyncio.gather(*asks, return_exceptions=True)
        finally:
            await templates.close()

    refusals = asyncio.run(run())
    assert [one.status for one in refusals if isinstance(one, ApiError)] == [429, 429]
    assert sum("longer than" in str(one) for one in refusals) == 3
