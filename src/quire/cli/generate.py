"""`quire generate`: completes prompts; one streams to stdout, several come as text or JSON lines."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from quire.cli.flags import (
    add_engine_flags,
    add_sampling_flags,
    add_structured_flags,
    sampling_from,
    structured_from,
)
from quire.cli.parser import Collect, Parser
from quire.cli.start import start_llm
from quire.cli.terminal import INTERRUPTED, interruptible
from quire.core.errors import InvalidRequest, QuireError
from quire.core.sampling import SamplingParams
from quire.engine.build import DEFAULT_MAX_TOKENS
from quire.llm.llm import LLM
from quire.llm.outputs import CompletionOutput, Logprob, RequestOutput
from quire.text.prompts import PreparedPrompt

REFUSED = 2
MARK = "\ufeff"  # a byte order mark, with which some editors begin a file
PromptEntry = str | Mapping[str, Any]  # text, or {"prompt"}, {"prompt_token_ids"} or {"messages"}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--prompt", "-p", action=Collect, metavar="TEXT", help="a prompt (repeatable)")
    parser.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="prompts, one per line, - for standard input; in a .jsonl file each line is a string or an object with "
        "prompt, prompt_token_ids or messages",
    )
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to each prompt")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the JSON objects to a .jsonl file")
    parser.add_argument("--quiet", action="store_true", help="print only errors on stderr")
    # one --seed flag sets both, the engine's and each request's
    add_engine_flags(parser, without=("seed",))
    add_sampling_flags(parser)
    add_structured_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    named = arguments.model_named
    if named is not None and " " in named and not Path(named).exists():
        raise InvalidRequest(f"{named!r} is in the position of the model: write --prompt before a prompt")
    sampling_from(arguments, SamplingParams(max_tokens=DEFAULT_MAX_TOKENS))  # before loading anything
    structured = structured_from(arguments)
    prompts = gather_prompts(arguments.prompt or (), arguments.prompt_file, sys.stdin)
    if arguments.system is not None and not arguments.chat:
        raise InvalidRequest("--system needs a chat template: add --chat")
    with _opened(arguments.output) as file, start_llm(arguments, quiet=arguments.quiet) as llm:
        if file is not None and file.seekable():
            file.truncate(0)  # now that there will be other results
        sampling = sampling_from(arguments, llm.default_sampling()).changed(structured=structured)
        records = file is not None or arguments.json
        if len(prompts) == 1 and sampling.n == 1 and not records:
            return _stream_one(llm, _prepared(llm, prompts[0], arguments), sampling)
        return _generate_all(llm, prompts, sampling, arguments, file)


def _stream_one(llm: LLM, prompt: PreparedPrompt, sampling: SamplingParams) -> int:
    with interruptible() as interrupted:
        for piece in llm.stream(prompt, sampling, interrupted):
            print(piece.text, end="", flush=True)
        print()
        return INTERRUPTED if interrupted() else 0


def _generate_all(
    llm: LLM,
    prompts: Sequence[PromptEntry],
    sampling: SamplingParams,
    arguments: argparse.Namespace,
    file: TextIO | None,
) -> int:
    """Serves every valid prompt, and shows a result when those before it are shown; each invalid prompt costs a line
    on stderr and makes the exit code 2."""
    results: list[RequestOutput | QuireError | None] = [None] * len(prompts)
    servable: list[tuple[int, PreparedPrompt]] = []
    for index, prompt in enumerate(prompts):
        try:
            servable.append((index, _prepared(llm, prompt, arguments)))
        except QuireError as error:
            results[index] = error
    hidden = arguments.quiet or not sys.stderr.isatty()
    num_shown = 0
    with interruptible() as interrupted, tqdm(total=len(prompts), disable=hidden, unit="req") as bar:
        bar.update(len(prompts) - len(servable))
        for position, result in llm.generate_each([p for _, p in servable], sampling, interrupted):
            results[servable[position][0]] = result
            bar.update(1)
            with bar.external_write_mode(sys.stdout):
                while num_shown < len(results) and results[num_shown] is not None:
                    _show(num_shown, len(results), results[num_shown], file, arguments.json)
                    num_shown += 1
        stopped = interrupted()
    for index in range(num_shown, len(results)):
        _show(index, len(results), results[index], file, arguments.json)
    refused = any(isinstance(outcome, QuireError) for outcome in results)
    return INTERRUPTED if stopped else REFUSED if refused else 0


def _show(
    index: int, count: int, result: RequestOutput | QuireError | None, file: TextIO | None, as_json: bool
) -> None:
    if result is None:
        return  # interrupted before it was done
    if isinstance(result, QuireError):
        print(f"quire: error: prompt {index + 1}: {result}", file=sys.stderr)
    if file is not None or as_json:
        line = json.dumps(result_record(index, result), ensure_ascii=False)
        if file is not None:
            file.write(line + "\n")
        if as_json:
            print(line, flush=True)
    elif isinstance(result, RequestOutput):
        for output in result.outputs:
            choice = f" answer {output.index + 1}" if len(result.outputs) > 1 else ""
            print(f"--- prompt {index + 1} of {count}{choice}\n{output.text}", flush=True)


def _prepared(llm: LLM, prompt: PromptEntry, arguments: argparse.Namespace) -> PreparedPrompt:
    messages: Any = prompt.get("messages") if isinstance(prompt, Mapping) else None
    if messages is None and arguments.chat:
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if text is None:
            raise InvalidRequest(
                "--chat needs text or messages, and this prompt has token ids: leave --chat out"
            )
        messages = [{"role": "user", "content": text}]
    if messages is None:
        return llm.prepare(prompt)
    if arguments.system is not None:
        messages = [{"role": "system", "content": arguments.system}, *messages]
    return llm.prepare(llm.template.render(messages), add_special_tokens=False, goes_on=False)


@contextmanager
def _opened(path: str | None) -> Iterator[TextIO | None]:
    """The output file, opened before the model is loaded, so that a path that cannot be written fails at once."""
    if path is None:
        yield None
        return
    try:
        file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise InvalidRequest(f"--output {path}: cannot be written ({error})") from error
    with file:
        yield file


# ---------------------------------------------------------------------- prompts in, records out


def gather_prompts(texts: Sequence[str], file: str | None, stdin: TextIO) -> list[PromptEntry]:
    """The prompts of --prompt, then of --prompt-file; without either, standard input as one prompt."""
    prompts: list[PromptEntry] = list(texts)
    if file is not None:
        prompts += _from_file(file, stdin)
    elif not prompts:
        if stdin.isatty():
            raise InvalidRequest(
                "there is no prompt: give --prompt TEXT, --prompt-file FILE, or pipe a text in"
            )
        prompts.append(stdin.read().removeprefix(MARK).rstrip("\n"))
    if not prompts:
        raise InvalidRequest(f"{file} holds no prompt: write one per line")
    return prompts


def _from_file(file: str, stdin: TextIO) -> list[PromptEntry]:
    if file == "-":
        return [line for line in stdin.read().removeprefix(MARK).split("\n") if line.strip()]
    try:  # str.splitlines would also cut at U+2028 and others, which a prompt may have
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prompt-file {file}: cannot be read ({error})") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if file.endswith((".jsonl", ".ndjson")):
        return [_entry(f"{file} line {number}", line) for number, line in numbered]
    return [line for _, line in numbered]


def _entry(where: str, line: str) -> PromptEntry:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: is no valid JSON ({error})") from error
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, dict) or not {"prompt", "prompt_token_ids", "messages"} & set(entry):
        raise InvalidRequest(
            f'{where}: write a string or an object with "prompt", "prompt_token_ids" or "messages"'
        )
    return entry


def result_record(index: int, result: RequestOutput | QuireError) -> dict[str, Any]:
    """One result for JSON. `index` is the prompt's position; a refused prompt has `error` instead of `outputs`."""
    if isinstance(result, QuireError):
        return {"index": index, "error": str(result)}
    record: dict[str, Any] = {
        "index": index,
        "prompt": result.prompt,
        "num_prompt_tokens": len(result.prompt_token_ids),
        "num_cached_tokens": result.num_cached_tokens,
        "outputs": [_output(output) for output in result.outputs],
        "seconds_to_first_token": result.metrics.first_token,
        "seconds": result.metrics.total,
    }
    if result.prompt_logprobs is not None:
        record["prompt_logprobs"] = [
            None if position is None else _logprobs(position) for position in result.prompt_logprobs
        ]
    return record


def _output(output: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        record["cumulative_logprob"] = output.cumulative_logprob
        record["logprobs"] = [_logprobs(position) for position in output.logprobs]
    return record


def _logprobs(position: dict[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {"logprob": entry.logprob, "rank": entry.rank, "token": entry.decoded_token}
        for token_id, entry in position.items()
    }
