"""A tab of a browser with the page of a server in it, for the tests of the page."""

import json
import time
from typing import Any

from tests.server.running import ADMIN_KEY, RunningServer

KEY = "the-users-key"
MESSAGE = "textarea[aria-label=Message]"


class Tab:
    """A page with keys, and all that it said and asked for."""

    def __init__(self, chromium: Any, server: RunningServer, key: str | None = KEY, **options: Any) -> None:
        self.context = chromium.new_context(viewport={"width": 1200, "height": 800}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda said: said.type == "error" and self.errors.append(said.text))
        self.page.on("pageerror", lambda fault: self.errors.append(str(fault)))
        self.page.on("request", lambda asked: self.hosts.add(asked.url.partition("//")[2].partition("/")[0]))
        if key is not None:
            keys = json.dumps({"quire.key": key, "quire.admin": ADMIN_KEY})
            self.page.add_init_script(
                f"Object.entries({keys}).forEach((pair) => sessionStorage.setItem(...pair))"
            )
        self.server = server
        self.page.goto(f"{server.url}/")

    def never_end(self, max_tokens: int = 6000) -> None:
        """Answers go on until they are stopped, however fast the machine is and whatever the model would say."""

        def longer(route: Any) -> None:
            body = {**route.request.post_data_json, "ignore_eos": True, "max_tokens": max_tokens}
            route.continue_(post_data=json.dumps(body))

        self.page.route("**/v1/chat/completions", longer)

    def ask(self, text: str, **settings: object) -> None:
        if settings:
            self.page.evaluate(
                f"localStorage.setItem('quire.settings', {json.dumps(json.dumps(settings))!s})"
            )
            self.page.reload()
        self.page.wait_for_selector(MESSAGE)
        self.page.fill(MESSAGE, text)
        self.page.keyboard.press("Enter")

    def until(self, expression: str, *argument: Any, seconds: float = 60.0) -> None:
        """Waits for it. Playwright's own wait would need `eval`, which the page's policy forbids."""
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(expression, *argument):
            assert time.monotonic() < deadline, expression
            time.sleep(0.02)

    def wait_answered(self) -> None:
        self.page.wait_for_selector(".thread[aria-busy=false]")

    def answer(self) -> str:
        return self.page.locator(".answer .text").last.inner_text()

    def close(self) -> None:
        self.context.close()
