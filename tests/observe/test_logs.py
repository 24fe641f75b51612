"""Log lines: where they go, how they look, what the environment may ask."""

import json
import logging
import re

import pytest

from quire.observe import logs


@pytest.fixture(autouse=True)
def fresh_logging():
    yield
    logs.configure()
    logging.getLogger("quire").propagate = True  # as conftest has it, for caplog


def test_a_line_has_a_time_a_level_a_room_and_the_message(capsys):
    logs.configure(level="INFO", form="text")
    logs.get_logger("quire.engine.loop").info("%d blocks", 12)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO    engine\.loop        12 blocks\n", captured.err)


def test_json_lines_carry_extra_fields_and_tracebacks(capsys):
    logs.configure(form="json")
    try:
        raise RuntimeError("lost")
    except RuntimeError:
        logs.get_logger("quire.engine").exception("step failed", extra={"step_id": 3})
    entry = json.loads(capsys.readouterr().err)
    assert (entry["level"], entry["logger"], entry["message"]) == ("ERROR", "quire.engine", "step failed")
    assert entry["step_id"] == 3
    assert "RuntimeError: lost" in entry["exception"]


def test_the_environment_sets_level_and_format(capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "warning")
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "json")
    logs.configure()
    logger = logs.get_logger("quire.x")
    logger.info("unseen")
    logger.warning("seen")
    assert json.loads(capsys.readouterr().err)["message"] == "seen"


def test_an_unknown_level_is_warned_about_and_info_is_used(capsys):
    logs.configure(level="loud")
    logs.get_logger("quire.x").info("still here")
    err = capsys.readouterr().err
    assert "QUIRE_LOG_LEVEL=LOUD is not known: choose one of DEBUG, INFO" in err
    assert "still here" in err


def test_configuring_twice_does_not_double_lines(capsys):
    logs.configure()
    logs.configure()
    logs.get_logger("quire.x").info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_a_foreign_name_is_put_under_quire():
    assert logs.get_logger("scripts.compare").name == "quire.scripts.compare"
    assert logs.get_logger("quire").name == "quire"
