"""`quire index add|list|search|remove FOLDER …`: a folder of passages that is kept, and searched without a server."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from quire.bench.table import aligned
from quire.cli.ask import add_files, add_retriever_flags, opened_retriever, passage_lines
from quire.cli.parser import Parser
from quire.cli.start import announce_compiling
from quire.core.errors import InvalidRequest
from quire.rag.library import opened_library
from quire.rag.retriever import files_in

REFUSED = 2


def add_arguments(parser: Parser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="add|list|search|remove", required=True)
    for name, about in (
        ("add", "add files to the index, or to a new one; unchanged ones are skipped"),
        ("list", "list the files of the index"),
        ("search", "print the passages that fit a query best"),
        ("remove", "remove files by their names in the list"),
    ):
        kind = kinds.add_parser(name, help=about, description=about)
        kind.add_argument("folder", metavar="FOLDER", help="folder of the index")
        kind.add_argument("--json", action="store_true", help="print JSON")
        kind.add_argument("--quiet", action="store_true", help="print only errors on stderr")
        if name in ("add", "remove"):
            kind.add_argument(
                "files", nargs="+", metavar="FILE", help="a file" + (", or a folder" if name == "add" else "")
            )
        if name == "search":
            kind.add_argument("query", metavar="QUERY", help="what to search for")
            kind.add_argument("-k", type=int, default=5, help="number of passages (default: 5)")
            kind.add_argument("--filter", metavar="JSON", help="condition on attributes, as in OpenAI's API")
        if name in ("add", "search"):
            add_retriever_flags(kind)


def run(arguments: argparse.Namespace) -> int:
    return {"add": _add, "list": _list, "search": _search, "remove": _remove}[arguments.kind](arguments)


def _add(arguments: argparse.Namespace) -> int:
    paths = list(files_in(arguments.files))
    if not arguments.quiet:
        announce_compiling()
    with opened_retriever(arguments, arguments.folder) as retriever:
        added = add_files(retriever, paths, arguments.quiet)
        files = retriever.files()
    counts = {"read": added, "refused": len(paths) - added, "files": len(files)}
    counts["passages"] = sum(file.num_chunks for file in files)
    if arguments.json:
        print(json.dumps(counts))
    else:
        print(f"{added} files read; the index has {counts['files']} files and {counts['passages']} passages")
    return REFUSED if counts["refused"] else 0


def _list(arguments: argparse.Namespace) -> int:
    with opened_library(Path(arguments.folder)) as library:
        files, settings = library.files(), library.settings
    if arguments.json:
        print(json.dumps({**asdict(settings), "files": [asdict(file) for file in files]}, ensure_ascii=False))
        return 0
    rows = [[file.name, f"{file.num_characters:,}", f"{file.num_chunks:,}"] for file in files]
    print(aligned([["file", "characters", "passages"], *rows], right=(1, 2)))
    print(f"\n{settings.embedder}, passages of {settings.max_tokens} tokens, overlap {settings.overlap}")
    return 0


def _search(arguments: argparse.Namespace) -> int:
    try:
        filters = None if arguments.filter is None else json.loads(arguments.filter)
    except ValueError as error:
        raise InvalidRequest(f"--filter is no valid JSON ({error})") from None
    with opened_library(Path(arguments.folder)):
        pass  # an index that is not there is said before a model is loaded
    with opened_retriever(arguments, arguments.folder) as retriever:
        passages = retriever.search(arguments.query, arguments.k, filters=filters)
    if arguments.json:
        print(json.dumps([asdict(passage) for passage in passages], ensure_ascii=False))
    else:
        print("\n".join(passage_lines(passages)) or "nothing fits")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    with opened_library(Path(arguments.folder)) as library:
        for name in arguments.files:
            library.remove(name)
        print(f"{len(arguments.files)} files removed; {len(library.files())} are left")
    return 0
