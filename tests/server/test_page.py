"""The page in a real Chromium: quick, small, streams, stops, branches, remembers, recovers, and its map is true."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.hostile import PAYLOADS
from tests.server.page_tab import KEY, MESSAGE, Tab
from tests.server.running import ADMIN_KEY, RunningServer
from tools.fetch_browser import executable

TAGS = "P H3 H4 H5 H6 STRONG EM S CODE PRE UL OL LI BLOCKQUOTE TABLE THEAD TBODY TR TH TD HR A DIV SPAN BUTTON svg path"

playwright = pytest.importorskip("playwright.sync_api")
needs_browser = pytest.mark.skipif(executable() is None, reason="no Chromium: run `make browser`")
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of this module's own: a test kills its engine."""
    data = tmp_path_factory.mktemp("data")
    running = RunningServer("--api-key", KEY, "--data-dir", str(data), "--no-embeddings")
    try:
        yield running.wait_ready()
    finally:
        running.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(executable()), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium: Any, keyed: RunningServer) -> Iterator[Tab]:
    tab = Tab(chromium, keyed)
    yield tab
    tab.close()


@needs_browser
@pytest.mark.browser
def test_the_page_is_quick_small_and_asks_no_other_host(tab: Tab, chromium: Any, keyed: RunningServer):
    tab.page.wait_for_selector(MESSAGE)
    for name in ("memory", "steps", "models"):
        tab.page.click(f"#tab-{name}")
        tab.page.wait_for_selector(f"#view-{name}:not([hidden]) .tile")
    sizes = """[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
        .filter((entry) => !entry.name.includes('/v1/') && !entry.name.includes('/metrics'))
        .map((entry) => entry.decodedBodySize)"""
    assert 50_000 < sum(tab.page.evaluate(sizes)) <= 250_000
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    paints = []
    while not paints or min(paints) >= 500:  # the quickest of six: other programs may keep the machine busy
        assert len(paints) < 6, paints
        visit = Tab(chromium, keyed)
        visit.until(paint)
        paints.append(visit.page.evaluate(paint))
        visit.close()
    assert tab.hosts == {keyed.url.partition("//")[2]}
    assert tab.errors == []


@needs_browser
@pytest.mark.browser
def test_an_answer_grows_and_stop_stops_it(tab: Tab):
    tab.never_end()
    tab.ask("Tell me a very long story about the sea.")
    lengths: set[int] = set()
    while len(lengths) < 6:
        lengths.add(len(tab.answer()))
        assert tab.page.get_attribute(".thread", "aria-busy") == "true"
    took: list[float] = []
    while not took or min(took) >= 200:  # the quickest of three
        assert len(took) < 3, took
        if took:
            tab.ask("And another one.")
            tab.page.wait_for_selector(".thread[aria-busy=true]")
        took.append(
            tab.page.evaluate("""async () => {
                const start = performance.now();
                document.querySelector('button[aria-label=Stop]').click();
                const thread = document.querySelector('.thread');
                while (thread.getAttribute('aria-busy') === 'true') await new Promise(requestAnimationFrame);
                return performance.now() - start;
            }""")
        )
    stopped = tab.answer()
    time.sleep(0.3)
    assert tab.answer() == stopped
    assert "stopped" in tab.page.locator(".facts").last.inner_text()
    tab.server.wait_idle()
    assert tab.errors == []


@needs_browser
@pytest.mark.browser
def test_edits_and_new_answers_are_branches_and_a_reload_keeps_them(tab: Tab):
    tab.ask("Say one word.", max_tokens="6", temperature="1")
    tab.wait_answered()
    tab.page.click(".again")
    tab.page.wait_for_selector(".turn.assistant .branches >> text=2/2")
    tab.wait_answered()
    tab.page.hover(".turn.user")
    tab.page.click(".turn.user .edit")
    tab.page.fill(".editing textarea", "Say another word.")
    composing = "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true})"
    tab.page.evaluate(f"document.querySelector('.editing textarea').dispatchEvent({composing})")
    assert tab.page.locator(".editing").count() == 1  # it ended a word of an input method
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector(".turn.user .branches >> text=2/2")
    tab.wait_answered()
    edited = tab.answer()
    tab.page.click(".turn.user .branches button >> nth=0")
    assert tab.page.inner_text(".user-text") == "Say one word."
    tab.page.click(".turn.user .branches button >> nth=1")
    tab.page.reload()
    tab.page.wait_for_selector(".user-text")
    assert tab.page.inner_text(".user-text") == "Say another word."
    assert tab.answer() == edited
    assert tab.page.inner_text(".chats li") == "Say one word."
    with tab.page.expect_download() as download:
        tab.page.click("button[aria-label='Export as Markdown']")
    assert "Say another word." in download.value.path().read_text()


@needs_browser
@pytest.mark.browser
def test_a_page_that_is_left_in_mid_answer_keeps_what_came(tab: Tab):
    tab.never_end()
    tab.ask("Tell me a very long story about the sea.")
    tab.until("(document.querySelector('.answer .text')?.innerText.length ?? 0) > 20")
    tab.page.reload()
    tab.page.wait_for_selector(".answer .text")
    assert len(tab.answer()) > 20
    assert "stopped" in tab.page.inner_text(".facts")
    assert tab.page.locator(".typing").count() == 0


@needs_browser
@pytest.mark.browser
def test_settings_that_cannot_be_sent_leave_the_question_where_it_is(tab: Tab):
    tab.ask("Hi", schema="{bad", max_tokens="4")
    tab.page.wait_for_selector("#banner >> text=Settings, JSON schema")
    assert tab.page.input_value(MESSAGE) == "Hi"
    assert tab.page.locator(".turn").count() == 0
    tab.page.click("#chat-settings")
    tab.page.fill("textarea[name=schema]", "")
    tab.page.focus(MESSAGE)
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector(".answer")
    tab.wait_answered()
    assert tab.page.locator(".turn.user").count() == 1
    assert tab.errors == []


@needs_browser
@pytest.mark.browser
def test_tokens_are_counted_and_tinted_as_far_as_they_are_known(tab: Tab):
    tab.ask("What is the capital of France?", temperature="0", tint=True)
    tab.wait_answered()
    assert tab.answer() == "The capital of France is Paris."  # and not the token that ended it
    assert tab.page.inner_text(".facts").startswith("8 tokens")
    tab.ask("Name a fruit.", n="2", max_tokens="6", tint=False)
    tab.wait_answered()
    counts = tab.page.locator(".turn:last-child .facts").all_inner_texts()
    assert [count.partition(" tokens")[0][:9] for count in counts] == ["at least "] * 2
    assert tab.errors == []


@needs_browser
@pytest.mark.browser
def test_another_conversation_keeps_what_came_of_an_answer(tab: Tab):
    tab.never_end()
    tab.ask("Tell me a very long story about the sea.")
    grown = "(before) => (document.querySelector('.answer .text')?.innerText.length ?? 0) > before"
    tab.until(grown, 20)
    tab.page.click(".chats li:has-text('Tell me') button >> nth=0")
    tab.until(grown, len(tab.answer()))  # the open one goes on
    tab.page.click("text=New chat")
    tab.wait_answered()
    assert tab.page.locator(".chats li").count() == 1
    tab.page.click(".chats li:has-text('Tell me') button >> nth=0")
    assert len(tab.answer()) > 20
    assert "stopped" in tab.page.inner_text(".facts")
    tab.ask("And another one.")
    tab.until("document.querySelectorAll('.answer .text').length == 2")
    tab.page.click(".chats button[aria-label=Delete]")
    tab.wait_answered()
    assert tab.page.locator(".chats li").count() == 0
    tab.server.wait_idle()
    assert tab.errors == []


@needs_browser
@pytest.mark.browser
def test_a_wrong_key_says_so_and_shows_nothing_else(chromium: Any, keyed: RunningServer):
    tab = Tab(chromium, keyed, key=None)
    tab.page.wait_for_selector("#key")
    assert tab.page.locator("#tabs button").count() == 0
    tab.page.fill("#key", "wrong")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("text=That key is not right")
    tab.page.fill("#key", KEY)
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector(MESSAGE)
    tab.page.keyboard.press("Alt+2")
    tab.page.wait_for_selector("text=This view needs the admin key")
    tab.page.fill("input[aria-label='Admin key']", ADMIN_KEY)
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector(".map-box canvas")
    assert tab.page.evaluate("sessionStorage.getItem('quire.key')") == KEY
    assert tab.page.evaluate("Object.keys(localStorage).filter((name) => name.includes('key')).length") == 0
    tab.page.evaluate("sessionStorage.setItem('quire.key', 'of-yesterday')")
    tab.page.keyboard.press("Alt+1")
    tab.ask("Hi")
    tab.page.wait_for_selector(".failure >> text=reload the page to enter another one")
    tab.close()


@needs_browser
@pytest.mark.browser
def test_the_map_is_true_and_four_answers_share_their_prompt(tab: Tab, keyed: RunningServer):
    tab.never_end(1200)  # of which four fit into the pool
    tab.ask("Compare the sea, the desert and the forest. " * 4, n="4")
    tab.page.click("#tab-memory")
    tab.page.evaluate("quire.feed.keepHistory = true")
    tab.until("quire.feed.mirror.counts().shared > 0")
    tab.page.click(".requests tbody tr")
    tab.page.wait_for_selector(".blocks-table .words >> text=Compare the sea")
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"messages": [{"role": "user", "content": "Write a poem."}], "max_tokens": 80, "ignore_eos": True}
    threads = [
        threading.Thread(
            target=keyed.post, args=("/v1/chat/completions",), kwargs={"json": body, "headers": headers}
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for _ in range(20):
        pool = keyed.pool()
        same = """([step, blocks]) => (quire.feed.history.get(step) ?? []).some(({ used, ...counts }) =>
            Object.keys({...counts, ...blocks}).every((name) => counts[name] === blocks[name]))"""
        tab.until(same, [pool["step"], pool["blocks"]])
    assert tab.page.evaluate("quire.feed.mirror.counters.copies") >= 3
    for thread in threads:
        thread.join()
    tab.until("quire.feed.mirror.counters.prefix_hits > 0")
    tab.page.click("#tab-chat")
    tab.page.click("button[aria-label=Stop]")
    tab.wait_answered()
    assert tab.errors == []


@needs_browser
@pytest.mark.browser
def test_a_page_of_another_version_is_told(tab: Tab):
    tab.page.route("**/version", lambda route: route.fulfill(json={"version": "9.9.9"}))
    tab.page.wait_for_selector(MESSAGE)
    tab.page.click("#tab-models")  # any view
    tab.page.wait_for_selector("#banner >> text=The server is version 9.9.9")


@needs_browser
@pytest.mark.browser
def test_several_models_one_of_which_cannot_start(chromium: Any, tmp_path: Path):
    """The page opens without a model, says why one fails, and the other one answers; a view of another version too."""
    path = tmp_path / "models.json"
    settings = {"max-num-seqs": 4, "kv-cache-memory-bytes": "64M", "no-embeddings": True}
    models = {
        "gone": str(tmp_path / "none"),
        "here": {"model": "builtin", "settings": settings},
        "small": {"model": "builtin", "settings": {**settings, "kv-cache-memory-bytes": "32M"}},
        "encoder": "minilm",
    }
    path.write_text(json.dumps({"models": models}))
    running = RunningServer("--models", str(path)).wait_ready()
    tab = Tab(chromium, running, key="any")
    try:
        tab.page.wait_for_selector(MESSAGE)
        tab.page.click("#tab-memory")
        tab.page.wait_for_selector("text=no model runs now")
        tab.page.click("#tab-models")
        tab.page.click(".models-table button >> nth=0")
        tab.page.wait_for_selector("#banner >> text=gone cannot be started")
        tab.page.wait_for_selector(".models-table .failed >> text=no such folder or file")
        tab.page.click("#tab-chat")
        tab.page.select_option("select[aria-label=Model]", "gone")
        tab.page.fill(MESSAGE, "Hi")
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_selector(".failure >> text=gone cannot be started")
        tab.page.select_option("select[aria-label=Model]", "here")
        tab.page.click(".failure button")
        tab.page.wait_for_selector(".facts >> text=here is starting")
        tab.until("(document.querySelector('.answer .text')?.innerText.length ?? 0) > 5")
        tab.page.route("**/page/steps.js", lambda route: route.fulfill(status=404))
        tab.page.click("#tab-steps")
        tab.page.wait_for_selector("#banner >> text=This view cannot be loaded")
        tab.page.click("#tab-memory")
        tab.until("quire.feed.mirror.num_blocks > 0")
        choose_an_engine(tab, running)
    finally:
        tab.close()
        running.close()


def choose_an_engine(tab: Tab, server: RunningServer) -> None:
    """Memory follows the model that was used last, or shows the one that is chosen; an encoder has no blocks."""
    blocks = tab.page.evaluate("quire.feed.mirror.num_blocks")
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    server.post("/v1/models/load", json={"model": "small"}, headers=admin)
    tab.until(f"quire.feed.mirror.num_blocks > 0 && quire.feed.mirror.num_blocks < {blocks}")
    tab.page.select_option(".engines select", "here")
    tab.until(f"quire.feed.mirror.num_blocks === {blocks}")
    tab.page.wait_for_selector("#view-memory .card h2 >> text=67 MB")
    tab.page.select_option(".engines select", "encoder (stopped)")
    tab.page.wait_for_selector("#view-memory >> text=encoder does not run now")
    tab.page.click("#tab-chat")
    assert tab.page.locator("select[aria-label=Model] option").all_inner_texts() == ["gone", "here", "small"]


@needs_browser
@pytest.mark.browser
def test_fifty_hostile_texts_become_text(tab: Tab):
    tab.page.wait_for_selector(MESSAGE)
    found = tab.page.evaluate(
        """async ([payloads, tags]) => {
            const { render, clean } = await import('./page/markdown.js');
            const { filesView } = await import('./page/files.js');
            const allowed = new Set(tags.split(' ')), wrong = [];
            const file = (text, i) => ({ id: `${i}`, filename: text.slice(0, 500), bytes: 1, purpose: 'x' });
            const answer = { data: payloads.map(file) };
            for (const tag of ['H1', 'H2', 'SECTION', 'INPUT', 'FORM', 'LABEL', 'SMALL']) allowed.add(tag);
            const control = /[\\u0000-\\u0008\\u000b-\\u001f\\u202a-\\u202e\\u2066-\\u2069]/;
            const panel = document.createElement('div');
            document.body.append(panel);
            const check = (name, node) => {
                for (const one of node.querySelectorAll('*')) {
                    if (!allowed.has(one.tagName)) wrong.push([name, one.tagName]);
                    for (const { name: attribute, value } of one.attributes) {
                        if (attribute.startsWith('on') || (attribute === 'src')) wrong.push([name, attribute, value]);
                        if (attribute === 'href' && !/^https?:/.test(value)) wrong.push([name, value]);
                    }
                }
                if (control.test(node.textContent)) wrong.push([name, 'control character']);
            };
            const start = performance.now();
            for (const text of payloads) {
                const node = document.createElement('div');
                document.body.append(node);
                for (const share of [0.3, 0.6, 1]) render(node, text.slice(0, Math.ceil(share * text.length)));
                check(text.slice(0, 40), node);
                const words = clean(text).slice(1, 8);
                if (text.startsWith('<') && !node.textContent.includes(words)) wrong.push([text, 'text is lost']);
                node.remove();
            }
            const seconds = (performance.now() - start) / 1000, original = window.fetch;
            window.fetch = async () => new Response(JSON.stringify(answer));
            await filesView(panel, { tell: () => {} }).show();
            window.fetch = original;
            check('file names', panel);
            return { wrong, seconds, rows: panel.querySelectorAll('tbody tr').length, pwned: window.pwned ?? null };
        }""",
        [PAYLOADS, TAGS],
    )
    assert found["wrong"] == []
    assert found["pwned"] is None
    assert found["rows"] >= 50
    assert found["seconds"] < 10
    assert tab.errors == []


@needs_browser
@pytest.mark.browser
def test_a_hostile_answer_and_title_become_text_in_the_chat(tab: Tab):
    text = PAYLOADS[0] + PAYLOADS[1] + " [here](javascript:window.pwned=1) **bold**"
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})
    tab.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream", body=f"data: {chunk}\n\ndata: [DONE]\n\n"
        ),
    )
    tab.ask(text)
    tab.wait_answered()
    assert tab.page.locator(".thread script, .thread img, .thread a, .chats img").count() == 0
    assert tab.page.locator(".answer strong").inner_text() == "bold"
    assert tab.page.evaluate("window.pwned ?? null") is None
    assert tab.errors == []


@needs_browser
@pytest.mark.browser
def test_fifty_thousand_blocks_are_drawn_thirty_times_a_second(tab: Tab):
    tab.page.wait_for_selector(MESSAGE)
    tab.page.click("#tab-memory")
    tab.page.wait_for_selector(".map-box canvas")
    drawing = """async () => {
        const { BlockMap } = await import('./page/blockmap.js');
        const mirror = Object.create(Object.getPrototypeOf(quire.feed.mirror));
        Object.assign(mirror, { sequences: new Map(), flashes: [], dirty: new Set() });
        mirror.reset({ num_blocks: 50000, block_size: 16 });
        const box = document.createElement('div'), map = new BlockMap(mirror);
        box.append(map.canvas);
        document.querySelector('.map-box').after(box);
        mirror.states.forEach((_, block) => { mirror.states[block] = block % 7 ? 2 : 10; });
        mirror.owners.forEach((_, block) => { mirror.owners[block] = block % 300; });
        let frames = 0, over = false;
        setTimeout(() => { over = true; }, 1000);
        const start = performance.now();
        while (!over) {
            mirror.whole = true;
            mirror.flashes = Array.from({ length: 100 }, (_, i) => ['copied', 1 + (frames * 100 + i) % 50000]);
            map.ask();
            await new Promise(requestAnimationFrame);
            frames += 1;
        }
        box.remove();
        return map.frames / ((performance.now() - start) / 1000);
    }"""
    rates: list[float] = []
    while not rates or max(rates) < 30:  # the best of five
        assert len(rates) < 5, rates
        rates.append(tab.page.evaluate(drawing))


@needs_browser
@pytest.mark.browser
def test_the_page_fits_a_telephone_and_works_by_keyboard(chromium: Any, keyed: RunningServer, tmp_path: Path):
    tab = Tab(chromium, keyed, color_scheme="dark", reduced_motion="reduce")
    tab.page.set_viewport_size({"width": 360, "height": 640})
    tab.page.wait_for_selector(MESSAGE)
    (tmp_path / f"batch_{'a1' * 30}.jsonl").write_text("{}")
    tab.page.click("#tab-files")
    tab.page.set_input_files("#view-files input[type=file]", list(tmp_path.iterdir()))
    tab.page.wait_for_selector("#view-files tr:has-text('batch_')")
    for name in ("memory", "steps", "models", "files", "training", "laboratory", "chat"):
        tab.page.click(f"#tab-{name}")
        tab.page.wait_for_timeout(150)
        assert tab.page.evaluate(f"document.getElementById('view-{name}').scrollWidth") <= 360
    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 25)"
    drawer, conversations = ".drawer:not([hidden])", ".side.open"
    for opens, panel, close in (
        ("#chat-settings", drawer, lambda: tab.page.click("button[aria-label='Close the settings']")),
        ("#chat-settings", drawer, lambda: tab.page.keyboard.press("Escape")),
        ("button[aria-label=Conversations]", conversations, lambda: tab.page.mouse.click(350, 300)),
    ):
        tab.page.click(opens)
        assert tab.page.locator(panel).count() == 1
        close()
        assert tab.page.locator(panel).count() == 0
    tab.page.focus("#tab-chat")
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.evaluate("document.activeElement.id") == "tab-memory"
    tab.page.keyboard.press("Home")
    tab.page.focus(MESSAGE)
    tab.page.keyboard.type("Say hello.")
    tab.page.keyboard.press("Enter")
    tab.until("(document.querySelector('.answer .text')?.innerText.length ?? 0) > 0")
    tab.wait_answered()
    tab.close()


def answers(tab: Tab, replies: dict[str, str]) -> list[str]:
    """These paths get these bodies in the place of the server's; returns the POSTs that come."""
    posts: list[str] = []

    def reply(route: Any) -> None:
        path = route.request.url.partition("/v1/")[2]
        if route.request.method == "POST":
            posts.append(path)
        route.fulfill(body=replies.get(path, "{}"))

    tab.page.route("**/v1/fine_tuning/**", reply)
    tab.page.route("**/v1/laboratory**", reply)
    tab.page.route("**/v1/laboratory/**", reply)
    return posts


@needs_browser
@pytest.mark.browser
def test_jobs_are_shown_with_their_loss_and_take_orders(tab: Tab):
    job = {"id": "ftjob-1", "model": "<b>m</b>", "status": "running", "user_provided_suffix": "mine"}
    steps = [{"step": step, "train_loss": 4 / step, "full_valid_loss": 5 / step} for step in (1, 2, 4)]
    events = [{"type": "metrics", "message": f"Step {data['step']}", "data": data} for data in steps]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in [{"message": "begun"}, *events])
    path = "fine_tuning/jobs"
    listed = json.dumps({"data": [job]})
    posts = answers(tab, {f"{path}?limit=100": listed, f"{path}/ftjob-1/events?stream=true": stream})
    tab.page.click("#tab-training")
    tab.page.wait_for_selector("#view-training .plot >> text=training 1.000 · validation 1.250")
    assert "<b>m</b>" in tab.page.inner_text("#view-training tbody")
    drawn = """() => { const c = document.querySelector('#view-training canvas');
        return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size > 3 }"""
    tab.until(drawn)
    for action in ("pause", "cancel"):
        with tab.page.expect_response(f"**/{path}/ftjob-1/{action}"):
            tab.page.click(f"#view-training button[aria-label={action}]")
        tab.page.wait_for_selector(f"#view-training button[aria-label={action}]")
    assert posts == [f"{path}/ftjob-1/pause", f"{path}/ftjob-1/cancel"]
    assert tab.errors == []


@needs_browser
@pytest.mark.browser
def test_files_make_a_store_and_one_that_fails_says_why(tab: Tab, tmp_path: Path):
    (tmp_path / "bad.pdf").write_text("no PDF")
    tab.page.click("#tab-files")
    tab.page.set_input_files("#view-files input[type=file]", tmp_path / "bad.pdf")
    tab.page.check("#view-files tbody input[aria-label='Choose bad.pdf']")
    tab.page.fill("#view-files .row-form input", "mine")
    tab.page.keyboard.press("Enter")
    why = tab.page.wait_for_selector("#view-files .failed div").inner_text()
    assert "embedding" in why  # this server has no model for them
    tab.page.click("#view-files tr:has-text('mine') button[aria-label=Delete]")
    tab.page.wait_for_selector("text=No stores yet.")
    assert tab.errors == []


@needs_browser
@pytest.mark.browser
def test_a_laboratory_report_is_shown_as_text(tab: Tab):
    results = {
        "take_away": "<img src=x onerror=alert(1)>",
        "checks": [{"claim": "less is lost", "measured": "2 %", "held": False}],
        "tables": [{"title": "Shares", "head": ["a"], "rows": [["javascript:alert(1)"]]}],
        "pictures": ["gone.png"],
    }
    report = {"file": "waste.json", "name": "waste", "date": "2026-11-16", "take_away": results["take_away"]}
    listing = {"folder": "quire-lab", "command": "quire bench lab NAME", "data": [report]}
    record = {"benchmark": "lab waste", "results": results}
    answers(tab, {"laboratory": json.dumps(listing), "laboratory/waste.json": json.dumps(record)})
    tab.page.click("#tab-laboratory")
    tab.page.click("#view-laboratory tbody button")
    tab.page.wait_for_selector("#view-laboratory >> text=not held: less is lost (2 %)")
    tab.page.wait_for_selector("#view-laboratory >> text=gone.png is not there")
    shown = tab.page.inner_text("#view-laboratory")
    for text in ("quire bench lab NAME", results["take_away"], "javascript:alert(1)"):
        assert text in shown
    assert tab.page.locator("#view-laboratory img").count() == 0
    assert tab.errors == []


@needs_browser
@pytest.mark.browser
def test_an_engine_that_dies_is_told_and_the_page_recovers(tab: Tab, keyed: RunningServer):
    tab.never_end()
    tab.ask("Tell me a very long story about the sea.")
    tab.until("(document.querySelector('.answer .text')?.innerText.length ?? 0) > 20")
    os.kill(keyed.engine_pid(), signal.SIGKILL)
    tab.page.wait_for_selector(".failure >> text=engine")
    partial = tab.page.inner_text(".answer .text")
    assert len(partial) > 20
    tab.page.click("#tab-memory")
    keyed.wait_status("/ready", 200)
    tab.until("quire.feed.mirror.num_blocks > 0")
    tab.page.click("#tab-chat")
    tab.page.click(".failure button")
    tab.page.wait_for_selector(".turn.assistant .branches >> text=2/2")
    tab.until("document.querySelector('.answer .text').innerText.length > 20")
    tab.page.keyboard.press("Escape")
    tab.wait_answered()
    assert tab.page.locator(".failure").count() == 0
