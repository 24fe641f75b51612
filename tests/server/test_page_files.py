"""What serves the page: its files, its path, and reports of the laboratory. tests/server/test_page.py has a browser."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from quire.server.settings import ServerSettings
from tests.server.scripted import ScriptedEngine, scripted_app

HTML = {"Accept": "text/html,application/xhtml+xml"}


def page_client(**settings: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=scripted_app(ScriptedEngine([]), **settings))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def fetch(*paths: str, headers: dict[str, str] | None = None, **settings: Any) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with page_client(**settings) as client:
            return [await client.get(path, headers=headers or {}) for path in paths]

    return asyncio.run(run())


def test_browsers_get_the_page_and_programs_get_json():
    (page,) = fetch("/", headers=HTML)
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'self'; ")
    assert "{{" not in page.text
    (plain,) = fetch("/")
    assert plain.json()["name"] == "quire"


def test_the_page_and_its_files_need_no_key_and_nothing_else_is_served_there():
    page, script, missing, above = fetch(
        "/", "/page/app.js", "/page/nothing.js", "/page/..%2Fpage.py", headers=HTML, api_keys=("k",)
    )
    assert (page.status_code, script.status_code) == (200, 200)
    assert script.headers["content-type"].startswith("text/javascript")
    assert (missing.status_code, above.status_code) == (404, 404)
    (again,) = fetch("/page/app.js", headers={"If-None-Match": script.headers["etag"]})
    assert again.status_code == 304


def test_the_page_works_behind_a_path():
    for root in ("/ai", ""):  # a proxy may cut the path off, or not
        page, script = fetch(f"{root}/", f"{root}/page/app.js", headers=HTML, root_path="/ai")
        assert 'src="page/app.js"' in page.text
        assert script.status_code == 200


def test_no_page_leaves_json_and_no_files():
    page, script = fetch("/", "/page/app.js", headers=HTML, page=False)
    assert page.json()["name"] == "quire"
    assert script.status_code == 404
    assert ServerSettings().page


def test_laboratory_reports_are_listed_and_nothing_else_of_the_folder(tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    (none,) = fetch("/v1/laboratory")
    assert (none.json()["data"], none.json()["command"]) == ([], "quire bench lab NAME")
    folder = tmp_path / "quire-lab"
    folder.mkdir()
    record = {"benchmark": "lab waste", "date": "2026-11-16", "results": {"take_away": "Less is lost."}}
    (folder / "waste.json").write_text(json.dumps(record))
    (folder / "half.json").write_text('{"benchmark": "lab')
    (folder / "other.json").write_text("[]")
    (folder / "notes.txt").write_text("private")
    (tmp_path / "above.json").write_text("{}")
    listed, report, text, above, page = fetch(
        "/v1/laboratory",
        "/v1/laboratory/waste.json",
        "/v1/laboratory/notes.txt",
        "/v1/laboratory/..%2Fabove.json",
        "/",
        headers=HTML,
    )
    about = {"file": "waste.json", "name": "waste", "date": "2026-11-16", "take_away": "Less is lost."}
    assert listed.json()["data"] == [about]
    assert report.json() == record
    assert (text.status_code, above.status_code) == (404, 404)
    assert 'name="quire-views" content="laboratory"' in page.text  # this app keeps no files
    (keyless,) = fetch("/v1/laboratory", api_keys=("k",))
    assert keyless.status_code == 401
