"""Records of measurements: every one is in its folder's index, and what docs name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "results"
HISTORY = ROOT / "src" / "quire_lab" / "history"


@pytest.mark.parametrize("folder", [RECORDS, HISTORY], ids=lambda folder: folder.name)
def test_the_index_has_one_row_for_every_record(folder: Path) -> None:
    rows = re.findall(r"^\| \[([\w.]+)\]\(([\w.]+)\) \|", (folder / "README.md").read_text(), re.MULTILINE)
    assert all(name == target for name, target in rows)
    assert sorted(name for name, _ in rows) == sorted(
        path.name for path in folder.iterdir() if path.name != "README.md"
    )


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_records_and_benchmarks_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"\]\(([^)#\s]*(?:benchmarks/results|quire_lab/history)/[^)#\s]+)\)", text):
        assert (page.parent / name).exists(), name
    for module in set(re.findall(r"quire_lab\.benchmarks\.(\w+)", text)):
        folder = ROOT / "src" / "quire_lab" / "benchmarks"
        assert (folder / f"{module}.py").exists() or (folder / module / "__main__.py").exists(), module
