"""Parser: argparse with one-line errors and `--config FILE`, whose values lie below the flags."""

import argparse
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from quire.cli.config_file import read_config_file
from quire.cli.other_flags import advice
from quire.core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Flags are never abbreviated: a flag added later must not change what an old script means."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def add_config_flag(self) -> None:
        self.add_argument(
            "--config",
            metavar="FILE",
            help="read flags from a YAML or JSON file, `block-size: 32` for --block-size 32; flags given here win",
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The flags, over those of the file that --config names, over the defaults."""
        for word in words:
            if word == "--config" or word.startswith("--config="):
                self._take_file(words)
                break
        found, unknown = self.parse_known_args(words)
        if unknown:  # answered with what was meant, perhaps
            known = self._taker(words)._option_string_actions
            hints = (advice(word, known) for word in unknown if word.startswith("-"))
            hint = next((hint for hint in hints if hint), None)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f": {hint}" if hint else ""))
        return found

    def _take_file(self, words: Sequence[str]) -> None:
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        finder.add_argument("--config")
        try:
            path = finder.parse_known_args(words)[0].config
        except argparse.ArgumentError as error:
            self.error(str(error))
        for key, value in read_config_file(path).items():
            taker = self._taker(words)
            action = taker._option_string_actions.get(f"--{key.replace('_', '-')}")
            if action is None or action.dest in ("help", "config"):
                hint = advice(f"--{key}", taker._option_string_actions) or f"see {taker.prog} --help"
                raise ConfigError(f"{path}: {key!r} is no flag of {taker.prog}: {hint}")
            taker.set_defaults(**{action.dest: self._converted(path, key, action, value)})

    def _taker(self, words: Sequence[str]) -> argparse.ArgumentParser:
        """Who has the flags: the parser of the sub-command that is named, if there are any, or this one."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return next((action.choices[word] for word in words if word in action.choices), self)
        return self

    def _converted(self, path: str, key: str, action: argparse.Action, value: Any) -> Any:
        """A file's value as the flag would give it."""
        if isinstance(action, argparse.BooleanOptionalAction | argparse._StoreTrueAction):
            if not isinstance(value, bool):
                raise ConfigError(f"{path}: {key} is {value!r}: write true or false")
            return value
        if isinstance(action, Collect):
            values = value if isinstance(value, list) else [value]
            return tuple(self._single(path, key, action, one) for one in values)
        return self._single(path, key, action, value)

    def _single(self, path: str, key: str, action: argparse.Action, value: Any) -> Any:
        if isinstance(value, dict) and action.dest == "speculative_config":
            value = json.dumps(value)  # what the flag takes as JSON is a mapping in a file
        if isinstance(value, (dict, list, bool)):
            raise ConfigError(f"{path}: {key} is {value!r}: write one number or text")
        if value is None:
            return None
        try:
            converted = self._get_value(action, str(value))
            self._check_value(action, converted)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{path}: {key}: {error.message}") from error
        return converted


class Collect(argparse.Action):
    """A flag that may be repeated. Values on the command line replace those of a file, they don't add to them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        value: Any,
        option: str | None = None,
    ) -> None:
        so_far = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, [*so_far, value] if isinstance(so_far, list) else [value])


class Gather(Collect):
    """A flag with several values, which may be repeated too."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        value: Any,
        option: str | None = None,
    ) -> None:
        so_far = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, [*so_far, *value] if isinstance(so_far, list) else list(value))
