"""The laboratory is a distribution of its own: what it contains, and what `quire` says where it is not installed."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

import quire
from quire.cli.main import main
from quire.core import laboratory

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "src" / "quire_lab"
QUIRE_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LAB_PROJECT = tomllib.loads((LAB / "pyproject.toml").read_text())


def test_both_distributions_have_one_version_and_name_each_other() -> None:
    version = quire.__version__
    assert QUIRE_PROJECT["project"]["version"] == LAB_PROJECT["project"]["version"] == version
    assert LAB_PROJECT["project"]["dependencies"] == [f"quire[bench]=={version}"]
    extras = QUIRE_PROJECT["project"]["optional-dependencies"]
    assert extras["lab"] == [f"{LAB_PROJECT['project']['name']}=={version}"]
    assert laboratory.INSTALL == "pip install 'quire[lab]'"


def test_the_laboratory_contains_its_own_packages_and_quire_none_of_them() -> None:
    find = QUIRE_PROJECT["tool"]["setuptools"]["packages"]["find"]
    installed = find_packages(ROOT / find["where"][0], include=find["include"])
    assert {name.split(".")[0] for name in installed} == {"quire"}
    folders = [path.parent.relative_to(LAB.parent) for path in LAB.rglob("__init__.py")]
    assert sorted(LAB_PROJECT["tool"]["setuptools"]["packages"]) == sorted(
        ".".join(folder.parts) for folder in folders if "build" not in folder.parts
    )


@pytest.mark.parametrize(
    "command",
    ["lab list", "lab", "lab kvcache --size quick", "fit --samples steps.json", "sharing --help"],
)
def test_a_missing_laboratory_is_said_with_the_command_that_installs_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(laboratory, "PACKAGE", "a_package_that_is_not_there")
    assert main(["bench", *command.split()]) == 2
    kind = command.split()[0]
    assert (
        f"`quire bench {kind}` is part of the laboratory, which is not installed" in capsys.readouterr().err
    )


def test_the_commands_of_quire_work_without_the_laboratory() -> None:
    """`None` in sys.modules hides a package from every import."""
    code = (
        "import sys\n"
        "sys.modules['quire_lab'] = None\n"
        "from quire.cli.main import main\n"
        "sys.exit(main(['bench', 'lab', 'list']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert laboratory.INSTALL in done.stderr


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (LAB / "benchmarks").glob("*.py") if path.stem != "__init__")
)
def test_a_benchmark_is_named_by_the_command_in_its_docstring(name: str) -> None:
    """Scripts are run as modules; `-m` finds them wherever the package is installed."""
    text = (LAB / "benchmarks" / f"{name}.py").read_text()
    assert '__name__ == "__main__"' not in text or f"python -m quire_lab.benchmarks.{name}" in text
    assert "sys.path" not in text
