"""Variables for flags, `quire config show`, `quire completion` and `quire service`."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from quire.cli.main import main


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[object, str]]:
    assert main(["config", "show", "--json", *words]) == 0
    rows = json.loads(capsys.readouterr().out)
    return {row["flag"]: (row["value"], row["origin"]) for row in rows}


def test_flags_win_over_variables_and_these_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("block-size: 8\nmax-num-seqs: 7\nseed: 3\n")
    monkeypatch.setenv("QUIRE_CONFIG", str(file))
    monkeypatch.setenv("QUIRE_BLOCK_SIZE", "32")
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("QUIRE_ENABLE_PREFIX_CACHING", "no")
    monkeypatch.setenv("QUIRE_LORA_MODULES", "a=/x 'b=/y z'")
    rows = shown(capsys, "serve", "--block-size", "64", "--api-key", "secret")
    assert rows["--block-size"] == (64, "--block-size")
    assert rows["--max-num-seqs"] == (9, "QUIRE_MAX_NUM_SEQS")
    assert rows["--seed"] == (3, str(file))
    assert rows["--enable-prefix-caching"] == (False, "QUIRE_ENABLE_PREFIX_CACHING")
    assert rows["--lora-modules"] == (["a=/x", "b=/y z"], "QUIRE_LORA_MODULES")
    assert rows["--api-key"][0] == "…"
    assert "--port" not in rows


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("QUIRE_BLOCK_SIZE", "x", "QUIRE_BLOCK_SIZE: invalid int value: 'x'"),
        ("QUIRE_LOG_REQUESTS", "maybe", "QUIRE_LOG_REQUESTS is 'maybe': write true or false"),
    ],
)
def test_a_bad_variable_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["config", "show"]) == 2
    assert message in capsys.readouterr().err


def test_all_settings_name_their_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--all", "serve"]) == 0
    assert "default (QUIRE_BLOCK_SIZE)" in capsys.readouterr().out
    assert main(["config", "show", "env"]) == 2
    assert "'env' has no settings to show" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("words", [["run"], ["ask", "why?"], ["finetune", "data.jsonl"], ["tune"]])
def test_every_command_that_takes_settings_shows_them(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", *words, "--model", "other"]) == 0
    assert "--model" in capsys.readouterr().out


def test_bash_completes_commands_flags_and_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "quire.bash"
    script.write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        typed = " ".join(f"'{word}'" for word in words)
        program = f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _quire"
        program += '; echo "${COMPREPLY[@]}"'
        return subprocess.run(
            ["bash", "-c", program], capture_output=True, text=True, check=True
        ).stdout.split()

    assert completed("quire", "ser") == ["serve", "service"]
    assert completed("quire", "serve", "--block-s") == ["--block-size"]
    assert completed("quire", "serve", "--log-format", "") == ["text", "json"]
    assert completed("quire", "completion", "z") == ["zsh"]
    assert completed("quire", "service", "inst") == ["install"]


def test_fish_and_zsh_have_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    assert "-l block-size" in capsys.readouterr().out
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload")


def test_a_unit_runs_the_server_with_these_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("QUIRE_CACHE", "/a cache")
    assert main(["service", "install", "--user", "--", "--port", "9000", "--api-key", "a$b%c"]) == 0
    path = tmp_path / "systemd/user/quire.service"
    assert "-m quire serve --port 9000 --api-key 'a$$b%%c'\n" in path.read_text()
    assert '\nEnvironment="QUIRE_CACHE=/a cache"\n' in path.read_text()
    if shutil.which("systemd-analyze"):
        checked = subprocess.run(
            ["systemd-analyze", "verify", "--user", str(path)], capture_output=True, text=True
        )
        assert str(path) not in checked.stderr, checked.stderr
        assert "quire.service:" not in checked.stderr, checked.stderr
    assert main(["service", "uninstall", "--user"]) == 0
    assert not path.exists()
    assert main(["service", "uninstall", "--user"]) == 2
    assert main(["service", "show", "--", "--prot", "1"]) == 2
    assert "did you mean --port?" in capsys.readouterr().err
