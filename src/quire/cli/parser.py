"""Parser: argparse with one-line errors, advice on unknown flags, and below the flags `QUIRE_*` and `--config FILE`.

Public argparse API only. jsonargparse and tyro also build flags from dataclasses, but would be a new dependency
of every start, and neither gives one-line errors with the nearest flag or other engines' names for it.
"""

import argparse
import difflib
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from quire.core.errors import ConfigError

# vLLM's, SGLang's and llama.cpp's flags that have another name here or are not needed
OTHER_ENGINES = {
    "--tp": "use -tp",
    "--enable-chunked-prefill": "it is always so here: leave it out",
    "--async-scheduling": "--steps-in-flight 1, the default, is that",
    "--trust-remote-code": "no code of a model is ever run: leave it out",
    "--scheduling-policy": "use --schedule",
    "--num-gpu-blocks-override": "use --num-blocks",
    **dict.fromkeys(("--context-length", "--ctx-size", "--max-seq-len"), "use --max-model-len"),
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--max-running-requests": "use --max-num-seqs",
    "--chunked-prefill-size": "use --max-num-batched-tokens",
    "--threads": "use --num-threads",
    "--model-path": "use --model",
    **dict.fromkeys(("--disable-radix-cache", "--no-prefix-caching"), "use --no-enable-prefix-caching"),
    **dict.fromkeys(
        ("--disable-log-requests", "--no-enable-log-requests"),
        "requests are logged with --log-requests only: leave it out",
    ),
    "--enable-log-requests": "use --log-requests",
    "--uvicorn-log-level": "use --log-level",
    **dict.fromkeys(("--speculative-model", "--num-speculative-tokens"), "use --speculative-config"),
    "--guided-decoding-backend": "there is one backend: leave it out",
    "--max-log-len": "requests' text is never logged: leave it out",
    "--download-dir": "set HF_HOME or QUIRE_CACHE in the environment",
    **dict.fromkeys(("--task", "--runner"), "an encoder serves embeddings, a decoder text: leave it out"),
}
# Variables that are read where they are needed, and mean more than a flag's default.
_READ_ELSEWHERE = frozenset(
    {"QUIRE_API_KEY", "QUIRE_ADMIN_KEY", "QUIRE_LOG_LEVEL", "QUIRE_LOG_FORMAT", "QUIRE_HELP"}
)
_SWITCHES = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str) -> int:
    """Bytes. K, M, G, T and KiB… count in 1024s, KB, MB, GB, TB in 1000s; a plain number is bytes."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?b?)\s*", text.lower())
    try:
        if match is None or match[3] == "i":
            raise ValueError
        base = 1000 if match[2] and match[3] == "b" else 1024
        return int(float(match[1]) * base ** _POWERS[match[2]])
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: write 2GiB, 512M or a number of bytes"
        ) from None


_METAVARS: dict[Any, str] = {int: "N", float: "X", parse_bytes: "BYTES"}  # of flags that name none


class FlagGroup:
    """A titled or exclusive group of a parser's flags; they can be set in a config file too."""

    def __init__(self, group: Any, flags: dict[str, argparse.Action]) -> None:
        self._group = group
        self._flags = flags

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        return _added(self._flags, self._group.add_argument, names, settings)


class Parser(argparse.ArgumentParser):
    """Flags are never abbreviated: a flag added later must not change what an old script means."""

    def __init__(self, **settings: Any) -> None:
        self._flags: dict[str, argparse.Action] = {}  # by every spelling; argparse adds --help at once
        self._kinds: Any = None
        self.intermixed = False  # whether flags may stand between positional words
        self.origins: dict[str, str] = {}  # by destination, of values that are not defaults
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        return _added(self._flags, super().add_argument, names, settings)

    def flags(self) -> Iterator[tuple[str, argparse.Action]]:
        """Each flag once, by its longest spelling, in the order in which they were added."""
        for action in dict.fromkeys(self._flags.values()):
            names = [name for name in action.option_strings if not name.startswith("--no-")]
            if names and action.dest != "help":
                yield max(names, key=len), action

    def add_subparsers(self, **settings: Any) -> Any:
        self._kinds = super().add_subparsers(**settings)
        return self._kinds

    def group(self, title: str, description: str | None = None) -> FlagGroup:
        return FlagGroup(self.add_argument_group(title, description), self._flags)

    def exclusive(self) -> FlagGroup:
        """A group of which one flag may be given."""
        return FlagGroup(self.add_mutually_exclusive_group(), self._flags)

    def add_config_flag(self) -> None:
        self.add_argument(
            "--config",
            metavar="FILE",
            help="read flags from a YAML or JSON file, `block-size: 32` for --block-size 32; the command line wins",
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The flags, over the environment's, over those of the file that --config names, over the defaults."""
        chosen = self._chosen(words)
        if "--config" in chosen._flags:
            chosen._take_file(words)
            chosen._take_environment()
        read = self.parse_known_intermixed_args if self.intermixed else self.parse_known_args
        arguments, unknown = read(words)
        arguments.given_words, arguments.given_flags = list(words), set()
        for word in words:
            if (action := chosen._flags.get(word.partition("=")[0])) is not None:
                self.origins[action.dest] = word.partition("=")[0]
                arguments.given_flags.add(action.dest)
        if unknown:
            hints = (advice(word, chosen._flags) for word in unknown if word.startswith("-"))
            hint = next((hint for hint in hints if hint), None)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f": {hint}" if hint else ""))
        return arguments

    def _chosen(self, words: Sequence[str]) -> "Parser":
        """The parser that has the flags: the named sub-command's, if there are sub-commands, or this one."""
        kinds: dict[str, Parser] = self._kinds.choices if self._kinds is not None else {}
        return next((kinds[word] for word in words if word in kinds), self)

    def _take_file(self, words: Sequence[str]) -> None:
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        finder.add_argument("--config")
        try:
            path = finder.parse_known_args(words)[0].config or os.environ.get("QUIRE_CONFIG")
        except argparse.ArgumentError as error:
            self.error(str(error))
        if path is None:
            return
        for key, value in read_config_file(path).items():
            action = self._flags.get(f"--{key.replace('_', '-')}")
            if action is None or action.dest in ("help", "config"):
                hint = advice(f"--{key}", self._flags) or f"see {self.prog} --help"
                raise ConfigError(f"{path}: {key!r} is no flag of {self.prog}: {hint}")
            try:
                self.set_defaults(**{action.dest: _converted(action, value)})
            except ValueError as error:
                raise ConfigError(f"{path}: {key}{error}") from error
            self.origins[action.dest] = path

    def _take_environment(self) -> None:
        for flag, action in self._flags.items():
            variable = environment_name(flag)
            if variable is None or variable not in os.environ or action.dest in ("help", "config"):
                continue
            try:
                self.set_defaults(
                    **{action.dest: _converted(action, _from_text(action, os.environ[variable]))}
                )
            except ValueError as error:
                raise ConfigError(f"{variable}{error}") from error
            self.origins[action.dest] = variable


def environment_name(flag: str) -> str | None:
    """QUIRE_BLOCK_SIZE for --block-size; None for a flag that no variable stands for."""
    if not flag.startswith("--") or flag.startswith("--no-"):
        return None
    variable = f"QUIRE_{flag[2:].upper().replace('-', '_')}"
    return None if variable in _READ_ELSEWHERE else variable


def _from_text(action: argparse.Action, text: str) -> Any:
    """A variable's value as a file would give it: several values are separated by spaces, as in a shell."""
    if action.nargs == 0:
        return _SWITCHES.get(text.strip().lower(), text)
    return shlex.split(text) if isinstance(action, Collect) else text


def _added(
    flags: dict[str, argparse.Action],
    add: Callable[..., argparse.Action],
    names: Sequence[str],
    settings: dict[str, Any],
) -> argparse.Action:
    """Adds a flag and notes it in `flags`."""
    if settings.get("type") in _METAVARS:
        settings.setdefault("metavar", _METAVARS[settings["type"]])
    action = add(*names, **settings)
    flags.update(dict.fromkeys(action.option_strings, action))
    return action


def _converted(action: argparse.Action, value: Any) -> Any:
    """A file's value as the flag would give it. ValueError says what is wrong with it, to follow its name."""
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise ValueError(f" is {value!r}: write true or false")
        return value
    if isinstance(action, Collect):
        return tuple(_single(action, item) for item in (value if isinstance(value, list) else [value]))
    return _single(action, value)


def _single(action: argparse.Action, value: Any) -> Any:
    if isinstance(value, dict) and action.metavar == "JSON":
        value = json.dumps(value)
    if isinstance(value, (dict, list, bool)):
        raise ValueError(f" is {value!r}: write one number or text")
    if value is None:
        return None
    convert: Any = action.type or str
    try:
        converted = convert(str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f": {error}") from error
    except (TypeError, ValueError):
        raise ValueError(f": invalid {convert.__name__} value: {str(value)!r}") from None
    if action.choices is not None and converted not in action.choices:
        raise ValueError(
            f": invalid choice: {converted!r} (choose from {', '.join(map(str, action.choices))})"
        )
    return converted


class Collect(argparse.Action):
    """A flag that may be repeated, with one value or several. The command line replaces what a file gives."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        given = values if isinstance(values, list) else [values]
        before = getattr(namespace, self.dest, None)
        # a file's values are a tuple
        setattr(namespace, self.dest, [*before, *given] if isinstance(before, list) else given)


def advice(flag: str, known: Collection[str]) -> str | None:
    """What to write instead of an unknown flag, or None if no known flag is similar."""
    name = flag.partition("=")[0].replace("_", "-")
    if name in known:
        return f"write {name}"
    if name in OTHER_ENGINES:
        return OTHER_ENGINES[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else None


# ---------------------------------------------------------------------- files


def read_config_file(path: str, flag: str = "--config") -> dict[str, Any]:
    """The top-level mapping of a JSON or YAML file, which `flag` named."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({error})") from error
    content = _parsed(path, text)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be a mapping from flags to values, not {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _parsed(path: str, text: str) -> Any:
    if path.endswith(".json") or text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is no valid JSON ({error})") from error
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: is no valid YAML ({' '.join(str(error).split())})") from error
