"""`quire completion bash|zsh|fish`: a script that completes commands, flags and their choices."""

import argparse
import shlex

from quire.cli.main import COMMANDS, command_parser
from quire.cli.parser import Parser

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="`source <(quire completion bash)` in ~/.bashrc")


def run(arguments: argparse.Namespace) -> int:
    parsers = {name: command_parser(name) for name in COMMANDS}
    if arguments.shell == "fish":
        print(_fish({name: command.help for name, command in COMMANDS.items()}, parsers))
    else:
        print(_bash(parsers, zsh=arguments.shell == "zsh"))
    return 0


def _positional(parser: Parser) -> list[str]:
    """Words that a command takes as they are: choices, or `install|show` of a metavar."""
    actions = [action for action in parser._actions if not action.option_strings]
    words = [_choices(action) or str(action.metavar).split()[0].split("|") for action in actions]
    return [word for several in words if len(several) > 1 for word in several]


def _choices(action: argparse.Action) -> list[str]:
    return [str(choice) for choice in action.choices or ()]


def _bash(parsers: dict[str, Parser], zsh: bool) -> str:
    cases, choices = [], []
    for name, parser in parsers.items():
        flags = list(parser.flags())
        words = [*_positional(parser), *(flag for flag, _ in flags)]
        cases.append(f"    {name}) words={shlex.quote(' '.join(words))} ;;")
        for flag, action in flags:
            if action.choices:
                choices.append(f"    {name}:{flag}) words={shlex.quote(' '.join(_choices(action)))} ;;")
    lines = [
        *(["autoload -U +X bashcompinit && bashcompinit"] if zsh else []),
        "_quire() {",
        '  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""',
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    COMPREPLY=($(compgen -W {shlex.quote(" ".join(parsers))} -- "$current")); return',
        "  fi",
        '  case "${COMP_WORDS[1]}:$before" in',
        *choices,
        "  esac",
        '  if [ -z "$words" ]; then case "${COMP_WORDS[1]}" in',
        *cases,
        "  esac; fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _quire quire",
    ]
    return "\n".join(lines)


def _fish(helps: dict[str, str], parsers: dict[str, Parser]) -> str:
    lines = ["complete -c quire -f -n __fish_use_subcommand"]
    for name, parser in parsers.items():
        lines.append(f"complete -c quire -n __fish_use_subcommand -a {name} -d {shlex.quote(helps[name])}")
        if words := _positional(parser):
            lines.append(
                f"complete -c quire -n '__fish_seen_subcommand_from {name}' -xa {shlex.quote(' '.join(words))}"
            )
        for flag, action in parser.flags():
            text = (action.help or "").split("(default")[0].strip().replace("%%", "%")
            line = f"complete -c quire -n '__fish_seen_subcommand_from {name}' -l {flag[2:]} -d {shlex.quote(text)}"
            lines.append(line + (f" -xa {shlex.quote(' '.join(_choices(action)))}" if action.choices else ""))
    return "\n".join(lines)
