"""The documentation: what it names exists, and pages say things in plain words."""

import re
from pathlib import Path

import pytest

import quire
from tools import models_page, words_gate

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "quire"
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
FILE = re.compile(r"`([\w/]+/\w+\.(?:py|cpp|h))`")


def section(page: str, heading: str) -> str:
    text = (DOCS / page).read_text()
    return re.split(r"\n## ", text.partition(f"\n## {heading}\n")[2])[0]


@pytest.mark.parametrize(("heading", "at_least"), [("Where is …", 10), ("The core path", 12)])
def test_files_named_in_the_tables_of_the_architecture_exist(heading, at_least):
    names = FILE.findall(section("architecture.md", heading))
    assert len(names) >= at_least
    assert [name for name in names if not (PACKAGE / name).is_file()] == []


def test_files_have_the_entry_points_that_the_architecture_names():
    lines = section("architecture.md", "Where is …").splitlines()
    rows = [line.split("|")[1:4] for line in lines if line.startswith("|") and "`" in line]
    missing = []
    for _, file, entry in rows:
        names = FILE.findall(file + entry)
        text = "".join((PACKAGE / name).read_text() for name in names)
        words = re.findall(r"`(\w+(?:\.\w+)*)`", entry)
        missing += [(names, word) for word in words if any(part not in text for part in word.split("."))]
    assert missing == []


def test_files_named_on_any_page_exist():
    roots = (PACKAGE, ROOT / "src", ROOT)
    missing = [
        (page.name, name)
        for page in PAGES
        if page.name != "CHANGELOG.md"  # of its day
        for name in FILE.findall(page.read_text())
        if not any((root / name).is_file() for root in roots)
    ]
    assert missing == []


def test_files_named_in_the_glossary_exist():
    names = FILE.findall((DOCS / "glossary.md").read_text())
    assert len(names) > 20
    assert [
        name for name in names if not (PACKAGE / name).is_file() and not (ROOT / "src" / name).is_file()
    ] == []


def test_the_glossary_defines_each_word_once():
    text = (DOCS / "glossary.md").read_text()
    words = re.findall(r"^\| \*\*(.+?)\*\*", text, re.MULTILINE)
    assert len(words) >= 60
    assert len(words) == len({word.lower() for word in words})


def test_the_reference_lists_every_public_name():
    listed = set(re.findall(r"^::: quire\.(\w+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE))
    assert listed == set(quire.__all__) - {"__version__"}


def test_every_room_is_listed_in_the_architecture():
    listed = set(
        re.findall(r"\w+", "\n".join(line[:22] for line in section("architecture.md", "Rooms").splitlines()))
    )
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms - listed == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_to_files(page):
    missing = []
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not re.match(r"https?://|mailto:", target) and not (page.parent / target).exists():
            missing.append(target)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_are_in_plain_words(page):
    lines = list(words_gate.mannered_words(page))
    if page.name == "glossary.md":  # it lists the earlier names
        first_of_earlier = page.read_text().partition("## Earlier names")[0].count("\n")
        lines = [line for line in lines if int(line.split(":")[1]) < first_of_earlier]
    assert lines == []


def test_the_page_of_models_is_what_the_table_of_architectures_gives():
    """`PYTHONPATH=src python tools/models_page.py` writes it."""
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page()
