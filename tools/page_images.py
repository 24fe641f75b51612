"""Takes the pictures of docs/page.md: a server with the built-in model under load, in the browser of `make browser`.

Usage: python -m tools.page_images [FOLDER]. Needs the packages of `dev`. The folder is docs/images by default.
"""

import asyncio
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tools.fetch_browser import executable

ROOT = Path(__file__).resolve().parents[1]
SERVER = ("--port", "0", "--kv-cache-memory-bytes", "200M", "--max-num-seqs", "32")
SYSTEM = (
    "You are a librarian. Answer in full sentences, be friendly, and say when you do not know something. " * 3
)
TASKS = ("Tell me a long story about", "Explain in detail", "Write an essay about", "List many facts about")
TOPICS = ("memory paging", "whales", "the sea", "trains", "Alan Turing", "bread", "clouds", "hash tables")


async def ask(client: Any, url: str, draw: random.Random, until: float) -> None:
    while time.monotonic() < until:
        content = f"{draw.choice(TASKS)} {draw.choice(TOPICS)}."
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
        body = {"messages": messages, "max_tokens": draw.randint(60, 400), "n": draw.choice([1, 1, 1, 4])}
        await client.post(f"{url}/v1/chat/completions", json=body)


def load(url: str, seconds: float, clients: int = 7) -> None:
    import httpx

    async def run() -> None:
        until = time.monotonic() + seconds
        async with httpx.AsyncClient(timeout=120) as client:
            await asyncio.gather(*(ask(client, url, random.Random(seed), until) for seed in range(clients)))

    asyncio.run(run())


def take(url: str, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(executable()), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")

        def picture(name: str) -> None:
            page.screenshot(path=folder / f"page-{name}.png")

        page.goto(url)
        page.wait_for_selector("textarea[aria-label=Message]")
        loading = threading.Thread(target=load, args=(url, 55.0), daemon=True)
        loading.start()
        page.click("#tab-memory")
        page.wait_for_timeout(12_000)
        picture("memory")
        page.click(".requests tbody tr >> nth=1")
        page.wait_for_timeout(1500)
        page.evaluate("document.querySelector('.view.memory').scrollTop = 150")
        page.mouse.move(640, 840)
        page.wait_for_timeout(200)
        picture("table")
        page.emulate_media(color_scheme="dark")
        page.click("#tab-steps")
        page.wait_for_timeout(40_000)
        picture("steps")
        loading.join()
        page.click("#tab-chat")
        page.click("#chat-settings")
        for name, value in (("n", "3"), ("max_tokens", "70"), ("seed", "4")):
            page.fill(f"input[name={name}]", value)
        page.check("input[name=tint]")
        answer(page, "Name three uses of a hash table.")
        picture("answers")
        page.emulate_media(color_scheme="light")
        page.click("#chat-settings")
        page.evaluate("localStorage.clear()")
        page.reload()
        answer(page, "What is a hash table? Answer in two sentences, then show a short Python example.")
        picture("chat")
        browser.close()


def answer(page: Any, question: str) -> None:
    page.fill("textarea[aria-label=Message]", question)
    page.keyboard.press("Enter")
    page.wait_for_selector(".thread[aria-busy=false]", timeout=60_000)
    page.mouse.move(5, 400)


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    if executable() is None:
        print("there is no browser: run `make browser`", file=sys.stderr)
        return 1
    server = subprocess.Popen(
        [sys.executable, "-m", "quire", "serve", *SERVER], stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        lines = (re.search(r"serving\s+(\S+)/v1", line) for line in server.stderr)
        url = next(match[1] for match in lines if match)
        threading.Thread(target=server.stderr.read, daemon=True).start()
        take(url, folder)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
