"""`quire ask "question" FILE…`: answers a question from files and prints the passages that the answer is from."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from quire.cli.flags import add_engine_flags, add_sampling_flags, engine_settings, sampling_from
from quire.cli.parser import Parser
from quire.cli.start import announce_compiling, start_llm
from quire.cli.terminal import INTERRUPTED, dim, interruptible
from quire.core.errors import InvalidRequest
from quire.core.sampling import SamplingParams
from quire.rag.chunks import check_chunking
from quire.rag.library import CitedPassage, opened_library
from quire.rag.parse import ParseError
from quire.rag.retriever import ANSWER_TOKENS, CHUNK_OVERLAP, CHUNK_TOKENS, Retriever, files_in

SHOWN = 90  # characters of a passage


def add_arguments(parser: Parser) -> None:
    parser.add_argument("question", metavar="QUESTION", help="the question")
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="text, Markdown, HTML, PDF, DOCX, JSON, CSV, code, or a folder",
    )
    parser.add_argument(
        "--index", metavar="FOLDER", help="an index of `quire index add`; FILEs are added to it"
    )
    parser.add_argument("-k", type=int, default=3, help="most passages in the prompt (default: 3)")
    parser.add_argument("--json", action="store_true", help="print answer and sources as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="print only errors on stderr")
    add_retriever_flags(parser)
    add_engine_flags(parser, without=("seed",), positional=False)
    add_sampling_flags(parser, without=("n", "best_of"))


def run(arguments: argparse.Namespace) -> int:
    usual = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    sampling = sampling_from(arguments, usual)  # before loading anything
    if not arguments.files and arguments.index is None:
        raise InvalidRequest("there is nothing to read: name files, or an index with --index FOLDER")
    engine_settings(arguments)
    if not arguments.files:
        with opened_library(Path(arguments.index)):
            pass  # an index that is not there is said before a model is loaded, and not made
    paths = list(files_in(arguments.files))
    if not arguments.quiet:
        announce_compiling()
    with opened_retriever(arguments, arguments.index) as retriever:
        if paths and not add_files(retriever, paths, arguments.quiet) and not retriever.files():
            raise InvalidRequest("none of the files could be read")
        with start_llm(arguments, quiet=True) as llm:
            retriever.use_llm(llm)
            messages, sources = retriever.prompt(
                arguments.question, arguments.k, sampling.max_tokens or ANSWER_TOKENS
            )
            prompt = llm.prepare(llm.template.render(messages), add_special_tokens=False, goes_on=False)
            pieces: list[str] = []
            with interruptible() as interrupted:
                for piece in llm.stream(prompt, sampling, interrupted):
                    pieces.append(piece.text)
                    if not arguments.json:
                        print(piece.text, end="", flush=True)
                stopped = interrupted()
    if arguments.json:
        record = {"answer": "".join(pieces).strip(), "sources": [asdict(source) for source in sources]}
        print(json.dumps(record, ensure_ascii=False))
    else:
        print("\n\nsources:")
        print("\n".join(passage_lines(sources)))
    return INTERRUPTED if stopped else 0


def add_retriever_flags(parser: Parser) -> None:
    group = parser.group("passages")
    group.add_argument("--embedding-model", metavar="MODEL", help="the encoder (default: the built-in one)")
    group.add_argument("--chunk-size", type=int, help=f"tokens of a passage (default: {CHUNK_TOKENS})")
    group.add_argument(
        "--chunk-overlap",
        type=int,
        help=f"tokens of overlap with the passage before (default: {CHUNK_OVERLAP})",
    )


@contextmanager
def opened_retriever(arguments: argparse.Namespace, folder: str | None) -> Iterator[Retriever]:
    size, overlap = arguments.chunk_size, arguments.chunk_overlap
    names = ("--chunk-size", "--chunk-overlap")
    try:
        check_chunking(size or CHUNK_TOKENS, 0 if overlap is None else overlap, names)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    retriever = Retriever(
        None if folder is None else Path(folder),
        embedder=arguments.embedding_model,
        max_tokens=size,
        overlap=overlap,
        use_tqdm=not arguments.quiet and sys.stderr.isatty(),
    )
    with retriever:
        yield retriever


def add_files(retriever: Retriever, paths: Sequence[Path], quiet: bool) -> int:
    """How many could be read; each of the others costs a line on stderr."""
    refused = 0
    with tqdm(total=len(paths), disable=quiet or not sys.stderr.isatty(), unit="file", leave=False) as bar:

        def note(path: Path, error: ParseError | None) -> None:
            nonlocal refused
            if error is not None:
                refused += 1
                bar.write(f"quire: {error}", file=sys.stderr)
            bar.update(1)

        on_file: Callable[[Path, ParseError | None], None] = note
        retriever.add(*paths, on_file=on_file)
    return len(paths) - refused


def passage_lines(passages: Sequence[CitedPassage]) -> Iterator[str]:
    """Of each: its number, file, position and score, and how it begins."""
    for number, passage in enumerate(passages, 1):
        start = " ".join(passage.text.split())
        shown = start if len(start) <= SHOWN else start[: SHOWN - 1] + "…"
        yield f"  [{number}] {passage.file}, {passage.position} ({passage.score:.2f})"
        yield dim(f"      {shown}", sys.stdout)
