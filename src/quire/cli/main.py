"""`quire COMMAND …`: finds the command, parses its flags, turns errors into one line and an exit code."""

import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from quire import __version__, load_module
from quire.cli.parser import Parser
from quire.cli.terminal import INTERRUPTED
from quire.core.errors import QuireError

FAULT, BAD_INPUT = 1, 2  # an unexpected failure; bad input or a bad setting


class Command(NamedTuple):
    module: str
    help: str


# A command's module is imported when it is chosen: most of them need torch, and `quire --help` must not wait for it.
COMMANDS = {
    "serve": Command("quire.cli.serve", "serve a model over HTTP: OpenAI's, Anthropic's and Ollama's APIs"),
    "run": Command("quire.cli.run", "talk to a model through a server in the background"),
    "ps": Command("quire.cli.ps", "list the servers that `quire run` started"),
    "stop": Command("quire.cli.stop", "stop servers that `quire run` started"),
    "pull": Command("quire.cli.pull", "fetch a model, so that it starts without the network"),
    "ls": Command("quire.cli.models", "list the cached models with their size"),
    "show": Command("quire.cli.show", "show a model's architecture, parameters, context and quantization"),
    "rm": Command("quire.cli.rm", "remove a model from the cache"),
    "chat": Command("quire.cli.chat", "chat with a model in the terminal"),
    "generate": Command("quire.cli.generate", "complete prompts from flags, a file or standard input"),
    "ask": Command("quire.cli.ask", "answer a question from files, with the sources"),
    "index": Command("quire.cli.index", "keep an index of files: add, list, search, remove"),
    "route": Command("quire.cli.route", "route requests to servers, each where it adds the least work"),
    "bench": Command(
        "quire.cli.bench", "measure throughput, latency and startup here, or load-test a server"
    ),
    "run-batch": Command("quire.cli.run_batch", "answer a file of requests in OpenAI's batch format"),
    "finetune": Command("quire.cli.finetune", "train a LoRA or QLoRA adapter of a model on examples"),
    "plan": Command("quire.cli.plan", "estimate memory, sequences, speed and cost of a model on a device"),
    "tune": Command("quire.cli.tune", "measure tile sizes of attention on this GPU and store the best"),
    "models": Command("quire.cli.models", "list the cached models, or the architectures that are served"),
    "config": Command("quire.cli.config", "show the settings of a command and where each comes from"),
    "completion": Command("quire.cli.completion", "print a script that completes commands for a shell"),
    "service": Command("quire.cli.service", "run the server with systemd: install, uninstall, show the unit"),
    "env": Command("quire.cli.env", "show versions, hardware and settings for a bug report"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Prints a traceback only with QUIRE_LOG_LEVEL=debug."""
    words = list(sys.argv[1:] if argv is None else argv)
    _tolerate_narrow_encodings()
    try:
        if not words or words[0] not in COMMANDS:
            return _without_command(words)
        arguments = command_parser(words[0]).parse(words[1:])
        code = int(load_module(COMMANDS[words[0]].module).run(arguments))
        sys.stdout.flush()  # a closed pipe is noticed here, not at the interpreter's exit
        return code
    except SystemExit as leave:  # argparse, after --help or a bad flag
        return leave.code if isinstance(leave.code, int) else FAULT
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except Exception as error:
        return _explain(error)


def command_parser(name: str) -> Parser:
    """The parser of a command, with its flags."""
    parser = Parser(prog=f"quire {name}", description=COMMANDS[name].help)
    load_module(COMMANDS[name].module).add_arguments(parser)
    return parser


def _without_command(words: list[str]) -> int:
    listing = "\n".join(f"  {name:<11}{command.help}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="quire",
        usage="quire COMMAND [MODEL] [flags]",
        description="Serves large language models. MODEL defaults to a small built-in model.",
        epilog=f"commands:\n{listing}\n\n`quire COMMAND --help` lists a command's flags.",
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    if not words:
        parser.print_help()
        return BAD_INPUT
    if words[0].startswith("-"):
        parser.parse_args(words)
        return BAD_INPUT
    return parser.error(f"{words[0]!r} is no command: {_hint(words[0])}")


def _hint(word: str) -> str:
    begun = [name for name in COMMANDS if name.startswith(word)]
    near = begun or difflib.get_close_matches(word, COMMANDS)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}"


def _explain(error: Exception) -> int:
    if os.environ.get("QUIRE_LOG_LEVEL", "").lower() == "debug":
        traceback.print_exc()
    if isinstance(error, QuireError):
        _say(f"error: {error}")
        return BAD_INPUT
    if isinstance(error, OSError):
        _say(f"error: {error}")
        return FAULT
    hint = "unexpected: QUIRE_LOG_LEVEL=debug shows a traceback; please report it"
    _say(f"error: {type(error).__name__}: {error} ({hint})")
    return FAULT


def _say(message: str) -> None:
    print("quire:", " ".join(message.split()), file=sys.stderr)


def _tolerate_narrow_encodings() -> None:
    """Escapes characters that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
