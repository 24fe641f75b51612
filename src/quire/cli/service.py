"""`quire service install [flags]`: a systemd unit that runs `quire serve` with these flags."""

import argparse
import getpass
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from quire.cli.main import command_parser
from quire.cli.parser import Parser
from quire.core.errors import ConfigError

UNIT = "quire.service"
STOP_SECONDS = 60


def add_arguments(parser: Parser) -> None:
    usage = "install, uninstall or show (print the unit), then --user for one without root, then flags of `quire serve`"
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="install|uninstall|show …", help=usage)


def run(arguments: argparse.Namespace) -> int:
    action = arguments.words[0] if arguments.words else ""
    user = "--user" in arguments.words
    flags = [word for word in arguments.words[1:] if word not in ("--", "--user")]
    if action not in ("install", "uninstall", "show"):
        raise ConfigError(f"quire service {action or 'has no action'}: write install, uninstall or show")
    if action == "uninstall":
        return _uninstall(user)
    command_parser("serve").parse(flags)  # a bad flag is refused now, not by a unit that does not start
    text = unit(flags, user)
    if action == "show":
        print(text, end="")
        return 0
    path = _folder(user) / UNIT
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except PermissionError as error:
        raise ConfigError(f"{path} cannot be written: run it as root, or install with --user") from error
    _systemctl(user, "daemon-reload")
    words = "systemctl --user" if user else "systemctl"
    print(f"wrote {path}: start it with `{words} enable --now quire`, follow it with `journalctl -fu quire`")
    return 0


def unit(flags: list[str], user: bool) -> str:
    """The server drains at SIGTERM; a crash starts it again, a bad setting (exit code 2) does not."""
    command = shlex.join([sys.executable, "-m", "quire", "serve", *flags])
    lines = [
        "[Unit]",
        "Description=Quire, a server for large language models",
        "After=network-online.target",
        "Wants=network-online.target",
        "",
        "[Service]",
        f"ExecStart={command.replace('%', '%%').replace('$', '$$')}",
        *([] if user else [f"User={getpass.getuser()}"]),
        *(
            f'Environment="{name}={os.environ[name].replace("%", "%%")}"'
            for name in ("QUIRE_CACHE", "HF_HOME")
            if name in os.environ
        ),
        "Restart=on-failure",
        "RestartPreventExitStatus=2",
        "RestartSec=2",
        f"TimeoutStopSec={STOP_SECONDS}",
        "KillMode=mixed",
        "LimitNOFILE=65536",
        "NoNewPrivileges=true",
        "",
        "[Install]",
        f"WantedBy={'default' if user else 'multi-user'}.target",
    ]
    return "\n".join(lines) + "\n"


def _folder(user: bool) -> Path:
    if not user:
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd/user"


def _uninstall(user: bool) -> int:
    path = _folder(user) / UNIT
    if not path.exists():
        raise ConfigError(f"{path} is not installed: nothing to remove")
    _systemctl(user, "disable", "--now", "quire")
    path.unlink()
    _systemctl(user, "daemon-reload")
    print(f"removed {path}")
    return 0


def _systemctl(user: bool, *words: str) -> None:
    """Where systemd is not running, the file alone is written."""
    with suppress(FileNotFoundError):
        subprocess.run(["systemctl", *(["--user"] if user else []), *words], check=False, capture_output=True)
