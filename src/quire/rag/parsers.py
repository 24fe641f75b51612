"""The text of a file: plain text and code, Markdown, HTML, PDF, DOCX, JSON and CSV. Runs in the parse process only.

A parser takes the open file and the limits, and returns text; pages of a PDF end with a form feed. FileProblem says
what is wrong with the file.
"""

import codecs
import csv
import io
import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from pathlib import PurePath
from typing import Any, BinaryIO
from xml.etree import ElementTree

PAGE_END = "\f"
_HTML = (".html", ".htm", ".xhtml")
_TABLES = {".csv": ",", ".tsv": "\t"}
_SIGNATURES = {
    b"%PDF-": "a PDF", b"PK\x03\x04": "a zip archive", b"\x89PNG": "a PNG image", b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image", b"\x7fELF": "a program", b"\x1f\x8b": "a gzip archive",
    b"\xd0\xcf\x11\xe0": "an old Office file", b"MZ": "a program",
}  # fmt: skip
_KNOWN_BINARY = (
    ".doc", ".ppt", ".pptx", ".xls", ".xlsx", ".odt", ".rtf", ".epub", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".mp3",
    ".mp4", ".wav", ".zip", ".gz", ".tar", ".7z", ".exe", ".so", ".dll", ".bin", ".parquet", ".sqlite",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ParseLimits:
    """Of one parse."""

    seconds: float = 10.0
    memory_bytes: int = 512 << 20  # of address space, the interpreter's own included
    max_pages: int = 2000
    max_characters: int = 20_000_000  # about OpenAI's 5 million tokens
    max_expanded_bytes: int = 128 << 20  # of a compressed file's text


class FileProblem(Exception):
    """`code` is OpenAI's: unsupported_file or invalid_file."""

    def __init__(self, message: str, code: str = "invalid_file") -> None:
        super().__init__(message)
        self.code = code


def parse(file: BinaryIO, filename: str, limits: ParseLimits) -> str:
    """The text of the file, which is not empty. The name's ending chooses the parser, and the content must fit it."""
    ending = PurePath(filename).suffix.lower()
    head = file.read(1024)
    file.seek(0)
    actual = next((kind for signature, kind in _SIGNATURES.items() if head.startswith(signature)), None)
    parser = _PARSERS.get(ending)
    if parser is not None:
        signature, kind = _EXPECTED[ending]
        if not head.lstrip()[:1024].startswith(signature):
            raise FileProblem(
                f"its name ends in {ending}, but it is {actual or 'no ' + kind}: rename or export it"
            )
        text = parser(file, limits)
    elif ending in _KNOWN_BINARY:
        raise FileProblem(f"{ending} files are not supported: convert it to text or PDF", "unsupported_file")
    else:
        # an unknown ending is text if it decodes: Makefile, .conf, any language's code
        if actual is not None or (
            b"\0" in head and not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        ):
            remedy = "let its name end in .pdf" if actual == "a PDF" else "convert it to text or PDF"
            raise FileProblem(f"it is {actual or 'no text'}: {remedy}", "unsupported_file")
        text = _TEXT_PARSERS.get(ending, _plain)(_decoded(file, limits), limits)
    text = text.encode("utf-8", "replace").decode()  # half characters cannot be encoded again
    _check_length(len(text), limits)
    if not text.strip():
        advice = ": recognize the text of a scanned PDF first" if ending == ".pdf" else ""
        raise FileProblem(f"it holds no text{advice}")
    return text


def _check_length(num_characters: int, limits: ParseLimits) -> None:
    if num_characters > limits.max_characters:
        raise FileProblem(
            f"it holds {num_characters:,} characters of text, and {limits.max_characters:,} are allowed: split it"
        )


def _decoded(file: BinaryIO, limits: ParseLimits) -> str:
    raw = file.read(4 * limits.max_characters + 4)
    if len(raw) > 4 * limits.max_characters:
        raise FileProblem(
            f"it has more than {len(raw) - 4:,} bytes, and {limits.max_characters:,} characters are allowed: split it"
        )
    encoding = "utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise FileProblem(
            f"byte {error.start:,} is no {encoding.removesuffix('-sig').upper()}: save it as UTF-8"
        ) from None
    if "\0" in text:
        raise FileProblem(f"it has a zero byte at character {text.index(chr(0)):,}, so it is no text")
    _check_length(len(text), limits)
    return text


# ---------------------------------------------------------------------- from text


def _plain(text: str, limits: ParseLimits) -> str:
    return text


def _json(text: str, limits: ParseLimits) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, indent=1)
    except RecursionError:
        raise FileProblem("its JSON is nested too deep") from None
    except ValueError as error:
        raise FileProblem(f"it is no valid JSON ({error})"[:300]) from None


def _table(text: str, limits: ParseLimits, delimiter: str) -> str:
    """Each row as `column: value; …`, so that a row is understood without the others."""
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise FileProblem(f"it is no valid CSV ({error})"[:300]) from None
    head = rows[0] if rows else []
    if len(rows) < 2 or not all(name.strip() and not _is_number(name) for name in head):
        return text
    lines = []
    for row in rows[1:]:
        named = [f"{name}: {value}" for name, value in zip(head, row, strict=False)]
        lines.append("; ".join(named + row[len(head) :]))
    return "\n".join(lines)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _html(text: str, limits: ParseLimits) -> str:
    page = _Page()
    page.feed(text)
    page.close()
    lines = (" ".join(line.split()) for line in "".join(page.parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


class _Page(HTMLParser):
    """What a reader sees: without scripts and styles, one line per block."""

    DROPPED = ("script", "style", "noscript", "template", "svg", "iframe", "object")
    BLOCKS = (
        "p", "div", "br", "li", "ul", "ol", "tr", "table", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article",
        "header", "footer", "blockquote", "pre", "title", "dt", "dd", "hr", "main", "nav", "aside", "figcaption",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._inside: str | None = None  # the element that is dropped
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if self._inside is not None:
            self._depth += tag == self._inside
        elif tag in self.DROPPED:
            self._inside, self._depth = tag, 1
        elif tag in self.BLOCKS:
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if self._inside is not None:
            self._depth -= tag == self._inside
            if self._depth == 0:
                self._inside = None
        elif tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            # within a line, breaks of the source mean nothing
            self.parts.append(re.sub(r"\s+", " ", data))


# ---------------------------------------------------------------------- PDF and DOCX


def _pdf(file: BinaryIO, limits: ParseLimits) -> str:
    import pypdf  # the parse process imports it before its limits hold

    try:
        reader = pypdf.PdfReader(file)
        if reader.is_encrypted and not reader.decrypt(""):
            raise FileProblem("it is encrypted: remove its password first")
        num_pages = len(reader.pages)
        if num_pages > limits.max_pages:
            raise FileProblem(f"it has {num_pages:,} pages, and {limits.max_pages:,} are allowed: split it")
        pages, length = [], 0
        for page in reader.pages:
            pages.append(page.extract_text().strip("\n"))
            length += len(pages[-1])
            _check_length(length, limits)
    except (FileProblem, MemoryError):
        raise
    except pypdf.errors.DependencyError:
        raise FileProblem("it is encrypted: remove its password first") from None
    except Exception as error:  # pypdf raises many kinds for broken files
        raise FileProblem(f"it cannot be read as PDF ({type(error).__name__}: {error})"[:300]) from None
    return PAGE_END.join(pages) if any(page.strip() for page in pages) else ""


_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"


def _docx(file: BinaryIO, limits: ParseLimits) -> str:
    try:
        with zipfile.ZipFile(file) as archive:
            entry = archive.getinfo("word/document.xml")
            with archive.open(entry) as stream:
                content = stream.read(limits.max_expanded_bytes + 1)
    except KeyError:
        raise FileProblem("it is a zip archive without word/document.xml, so it is no DOCX") from None
    except MemoryError:
        raise
    except Exception as error:  # zipfile raises many kinds for broken files
        raise FileProblem(f"it cannot be read as DOCX ({type(error).__name__}: {error})"[:300]) from None
    if len(content) > limits.max_expanded_bytes:
        raise FileProblem(f"its text unpacks to more than {limits.max_expanded_bytes >> 20} MiB: split it")
    if b"<!DOCTYPE" in content or b"<!ENTITY" in content:
        raise FileProblem("its XML defines entities, which no DOCX needs")
    parts: list[str] = []
    try:
        for _, element in ElementTree.iterparse(io.BytesIO(content)):
            if element.tag == f"{_WORD}t":
                parts.append(element.text or "")
            elif element.tag in (f"{_WORD}tab", f"{_WORD}br"):
                parts.append("\t" if element.tag.endswith("tab") else "\n")
            elif element.tag == f"{_WORD}p":
                parts.append("\n")
                element.clear()
    except ElementTree.ParseError as error:
        raise FileProblem(f"its XML is broken ({error})") from None
    return "".join(parts)


_PARSERS: dict[str, Callable[[BinaryIO, ParseLimits], str]] = {".pdf": _pdf, ".docx": _docx}
_EXPECTED = {".pdf": (b"%PDF-", "PDF"), ".docx": (b"PK\x03\x04", "DOCX")}
_TEXT_PARSERS: dict[str, Callable[[str, ParseLimits], str]] = {
    ".json": _json,
    **dict.fromkeys(_HTML, _html),
    **{ending: partial(_table, delimiter=delimiter) for ending, delimiter in _TABLES.items()},
}
