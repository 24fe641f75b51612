"""Log lines on stderr: aligned for people, or one JSON object per line with QUIRE_LOG_FORMAT=json."""

import json
import logging
import os
import sys
import time
from typing import TextIO

ROOT = "quire"
FORMATS = ("text", "json")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

# What every record has; anything beyond came through `extra=` and belongs into the JSON line.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def get_logger(name: str) -> logging.Logger:
    """The logger of a module (pass `__name__`); its lines go to stderr as the environment asks.

    QUIRE_LOG_LEVEL is DEBUG, INFO (default), WARNING, ERROR or CRITICAL; QUIRE_LOG_FORMAT is text or json.
    """
    root = logging.getLogger(ROOT)
    if not any(isinstance(handler, _StderrHandler) for handler in root.handlers):
        configure()
    return logging.getLogger(name if name == ROOT or name.startswith(ROOT + ".") else f"{ROOT}.{name}")


def configure(level: str | None = None, form: str | None = None) -> None:
    """Set the level and the format of all log lines; what is None comes from the environment.

    May be called again at any time. A name that is not known is warned about, never fatal.
    """
    level = (level or os.environ.get("QUIRE_LOG_LEVEL") or "INFO").upper()
    form = (form or os.environ.get("QUIRE_LOG_FORMAT") or "text").lower()
    handler = _StderrHandler()
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    root = logging.getLogger(ROOT)
    for old in [h for h in root.handlers if isinstance(h, _StderrHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.propagate = False  # an application's root handler would print every line a second time
    root.setLevel(level if level in LEVELS else "INFO")
    if level not in LEVELS:
        root.warning(
            "QUIRE_LOG_LEVEL=%s is not known: choose one of %s; using INFO", level, ", ".join(LEVELS)
        )
    if form not in FORMATS:
        root.warning("QUIRE_LOG_FORMAT=%s is not known: choose text or json; using text", form)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is at the time of the line, so that a redirected stderr is respected."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _TextFormatter(logging.Formatter):
    """`12:03:04.567 INFO    engine.loop        the message`, a traceback below if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        where = record.name.removeprefix(ROOT + ".")
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {where:<18} {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, every `extra=` field, a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)
