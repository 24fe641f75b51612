"""The project's own promises: pinned packages, the rooms' contract, the gates, what `make` says."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import quire
from tools import budget_gate, commits_gate, imports_gate, size_gate, words_gate

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = (ROOT / "requirements" / "constraints.txt").read_text()
CONTRACTS = {contract["id"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
LAYERS = [re.findall(r"\w+", layer) for layer in CONTRACTS["rooms"]["layers"]]


def existing_rooms() -> set[str]:
    return {path.parent.name for path in (ROOT / "src" / "quire").glob("*/__init__.py")}


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


def pins() -> dict[str, str]:
    lines = [line for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


# Packages


def test_every_declared_package_is_pinned_to_one_version():
    declared = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        declared += extra
    names = {re.split(r"[\[<>=~ ]", item)[0].lower().replace("_", "-") for item in declared}
    names -= {"quire", "quire-lab"}  # this repository's own
    assert names - set(pins()) == set()


def test_pins_are_versions_only_and_torch_has_no_local_build():
    assert pins()["torch"] == "2.13.0"
    for name, version in pins().items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), f"{name}=={version}"


def test_building_the_package_needs_no_torch():
    assert [re.split(r"[<>=]", item)[0] for item in PROJECT["build-system"]["requires"]] == ["setuptools"]


def test_the_package_says_the_version_that_the_project_declares():
    assert quire.__version__ == PROJECT["project"]["version"]


# Rooms


def test_every_room_has_its_place_in_the_contract():
    assert existing_rooms() <= {room for layer in LAYERS for room in layer}


def test_every_room_from_llm_down_is_held_to_the_bare_engines_libraries():
    flat = [room for layer in LAYERS for room in layer]
    below = set(flat[flat.index("llm") :]) - {"link"}
    held = {name.removeprefix("quire.") for name in CONTRACTS["bare-engine"]["source_modules"]}
    assert existing_rooms() & below <= held
    assert below == set(imports_gate.ALLOWED)


def test_core_memory_and_scheduler_load_without_torch():
    code = (
        "import importlib, pkgutil, sys\n"
        "for room in ('core', 'memory', 'scheduler', 'observe'):\n"
        "    package = importlib.import_module(f'quire.{room}')\n"
        "    for module in pkgutil.iter_modules(package.__path__):\n"
        "        importlib.import_module(f'quire.{room}.{module.name}')\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", check=False)
    assert run.returncode == 0


# Gates


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def function_of(num_lines: int, decorator: str = "") -> str:
    return f"{decorator}def work():\n" + "    pass\n" * (num_lines - 1)


def test_the_size_gate_names_long_files_and_functions(tmp_path, capsys):
    write(tmp_path, "src/long.py", "x = 1\n" * 601)
    write(tmp_path, "src/kernel.cpp", "//\n" * 601)
    write(tmp_path, "tests/test_x.py", "\n" + function_of(81))
    write(tmp_path, "src/fine.py", function_of(80) + "x = 1\n" * 520)
    assert size_gate.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "src/long.py:1: file has 601 lines (at most 600)" in out
    assert "src/kernel.cpp:1: file has 601 lines" in out
    assert "tests/test_x.py:2: function work has 81 lines (at most 80)" in out
    assert "fine" not in out


@pytest.mark.parametrize("decorator", ["@triton.jit\n", "@triton.jit(do_not_specialize=['n'])\n"])
def test_the_size_gate_spares_triton_kernels(tmp_path, decorator):
    write(tmp_path, "src/kernel.py", function_of(200, decorator))
    assert size_gate.findings(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("weights/folder.py", "import tqdm", "folder.py:1: imports tqdm; room weights may use"),
        ("core/step.py", "import numpy", "room core may use the standard library only"),
        ("scheduler/queue.py", "from torch import nn", "imports torch; room scheduler may use numpy"),
        ("weights/gguf.py", "import gguf", "imports gguf at the top"),
        (
            "engine/engine.py",
            "def f():\n    from quire.llm import x",
            "engine.py:2: imports quire.llm inside a",
        ),
    ],
)
def test_the_imports_gate_names_what_a_room_may_not_import(tmp_path, name, text, finding):
    write(tmp_path, f"src/quire/{name}", text)
    assert [line for line in imports_gate.findings(tmp_path) if finding in line]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llm/llm.py", "import torch, tqdm, json\nfrom quire.core import errors"),
        ("weights/gguf.py", "def read():\n    import gguf"),
        ("weights/types.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import gguf"),
        ("kernels/registry.py", "def load():\n    from quire.kernels import norm"),
        ("server/app.py", "import fastapi"),
        ("__init__.py", "def __getattr__(name):\n    from quire.llm import LLM"),
    ],
)
def test_the_imports_gate_passes_what_the_design_allows(tmp_path, name, text):
    write(tmp_path, f"src/quire/{name}", text)
    assert imports_gate.findings(tmp_path) == []


def test_the_words_gate_names_mannered_words_vague_variables_and_equal_class_names(tmp_path):
    write(tmp_path, "a.py", "# Whoever reads this\nclass Pool:\n    pass\n")
    write(tmp_path, "b.py", "class Pool:\n    pass\n\n\n" + function_of(11).replace("pass", "found = 1", 1))
    lines = list(words_gate.check(tmp_path))
    assert [line for line in lines if "a.py:1: plain words instead of 'Whoever'" in line]
    assert [line for line in lines if "b.py:5: a variable 'found' in work" in line]
    assert [line for line in lines if "2 classes are named Pool" in line]
    assert len(lines) == 3
    write(tmp_path, "native/c.h", "// for so many rows\nint _rehearse_all();\nint some_companies;\n")
    assert len(list(words_gate.check(tmp_path))) == 5


def test_the_loop_and_the_scheduler_stay_short():
    package = ROOT / "src" / "quire"
    step = next(
        node
        for node in ast.walk(ast.parse((package / "engine" / "engine.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "step"
    )
    assert step.end_lineno - step.lineno < 25
    assert len((package / "scheduler" / "scheduler.py").read_text().splitlines()) <= 250


def test_the_budget_gate_counts_the_core_path_without_features_that_hook_in(tmp_path, capsys):
    package = "src/quire"
    for name in ("core/request.py", "memory/blocks.py", "scheduler/order/fair.py", "engine/engine.py"):
        write(tmp_path, f"{package}/{name}", "x = 1\n" * 1_000)
    for name in ("core/config.py", "engine/adapters.py", "engine/build/load.py", "server/app.py"):
        write(tmp_path, f"{package}/{name}", "x = 1\n" * 9_000)
    assert budget_gate.main(["core", str(tmp_path)]) == 0
    assert "core path: 4,000 lines in 4 files" in capsys.readouterr().out
    write(tmp_path, f"{package}/runner/runner.py", "x = 1\n" * 3_001)
    assert budget_gate.main(["core", str(tmp_path)]) == 1
    assert "runner 3,001" in capsys.readouterr().out


def test_the_budget_gate_bounds_ranks_and_replicas(tmp_path, capsys):
    assert budget_gate.main(["parts", str(ROOT)]) == 0
    package = "src/quire"
    for name in (
        "parallel/group.py",
        "parallel/cut.py",
        "runner/ranked.py",
        "runner/runner.py",
        "fleet/mig.py",
    ):
        write(tmp_path, f"{package}/{name}", "x = 1\n" * 333)
    assert budget_gate.main(["parts", str(tmp_path)]) == 0
    write(tmp_path, f"{package}/engine/build/peer.py", "x = 1\n" * 2)
    assert budget_gate.main(["parts", str(tmp_path)]) == 1
    assert "ranks: 1,001 lines (at most 1,000)" in capsys.readouterr().out


def test_the_budget_gate_bounds_lines_and_files_of_the_package(tmp_path, capsys):
    write(tmp_path, "src/quire/a.py", "x = 1\n" * budget_gate.MAX_LINES)
    assert budget_gate.main(["total", str(tmp_path)]) == 0
    write(tmp_path, "src/quire/b.py", "x = 1\n")
    assert budget_gate.main(["total", str(tmp_path)]) == 1
    assert f"{budget_gate.MAX_LINES + 1:,} lines in 2 files" in capsys.readouterr().out


# Commits


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    run_git(tmp_path, "init", "--quiet")
    commit(tmp_path, "Start")
    return tmp_path


def run_git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()


def commit(root: Path, message: str) -> str:
    run_git(root, "commit", "--quiet", "--allow-empty", "--message", message)
    return run_git(root, "rev-parse", "HEAD")


def test_the_commit_gate_names_long_subjects_and_missing_bodies(repository, capsys):
    base = commit(repository, "The rule starts after this commit " + "x" * 80)
    commit(repository, "A short subject\n\nAnd why.")
    assert commits_gate.main([str(repository), base]) == 0
    commit(repository, "No body")
    commit(repository, "x" * 73 + "\n\nAnd why.")
    assert commits_gate.main([str(repository), base]) == 1
    out = capsys.readouterr().out
    assert "no body that says why: No body" in out
    assert "the subject has 73 characters (at most 72)" in out
    assert "3 commits, 2 findings" in out


def test_the_commit_gate_skips_merges(repository):
    base = run_git(repository, "rev-parse", "HEAD")
    run_git(repository, "checkout", "--quiet", "-b", "side")
    commit(repository, "Side\n\nWhy.")
    run_git(repository, "checkout", "--quiet", "-")
    commit(repository, "Main\n\nWhy.")
    run_git(repository, "merge", "--quiet", "--no-ff", "--message", "Merge", "side")
    assert commits_gate.main([str(repository), base]) == 0


def test_the_commit_gate_passes_where_there_is_no_full_history(repository, tmp_path_factory, capsys):
    commit(repository, "No body")
    shallow = tmp_path_factory.mktemp("shallow") / "clone"
    run_git(repository, "clone", "--quiet", "--depth", "1", f"file://{repository}", str(shallow))
    assert commits_gate.main([str(shallow), "0" * 40]) == 0
    assert commits_gate.main([str(repository), "0" * 40]) == 0
    assert commits_gate.main([str(tmp_path_factory.mktemp("plain"))]) == 0
    assert capsys.readouterr().out.count("nothing checked") == 3


# make


def test_make_alone_lists_every_target():
    listed = make().stdout
    for target in ("setup", "chat", "test", "check", "format", "site", "compare-cpu", "bench", "clean"):
        assert re.search(rf"^  {target} +\S", listed, re.MULTILINE)


def test_an_old_python_is_refused_with_its_version_and_the_remedy(tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    old.chmod(0o755)
    refused = make("setup", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert refused.returncode != 0
    assert f"Quire needs Python 3.11 or later; {old} is Python 3.9.2." in refused.stderr
    assert "make setup PYTHON=" in refused.stderr
    assert not (tmp_path / "venv").exists()
