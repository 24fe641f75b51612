"""parse_file: the text of each kind of file, and one clear error for files that are broken or hostile."""

import threading
import time
from pathlib import Path

import pytest
from rag.files import docx, docx_of, pdf, zip_bomb

from quire.rag import parse as parsing
from quire.rag.parse import ParseError, ParseLimits, parse_file


def parsed(folder: Path, name: str, content: bytes | str, limits: ParseLimits = parsing.USUAL_LIMITS) -> str:
    path = folder / "upload"  # the name, not the path, says what it is
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return parse_file(path, name, limits)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "Makefile", "a.unknown"])
def test_text_and_code_are_kept_as_they_are(tmp_path: Path, name: str) -> None:
    assert parsed(tmp_path, name, "# Ünï\n\tcode;\n") == "# Ünï\n\tcode;\n"


def test_encodings_with_a_mark_are_read(tmp_path: Path) -> None:
    assert parsed(tmp_path, "a.txt", "grüße".encode("utf-16")) == "grüße"
    assert parsed(tmp_path, "a.txt", b"\xef\xbb\xbfhello") == "hello"


def test_html_without_scripts_and_styles(tmp_path: Path) -> None:
    page = """<html><head><title>Grok</title><style>p {color: red}</style><script>alert("x <p>")</script></head>
    <body><h1>About</h1><p>33 billion
    para&shy;meters &amp; more</p><script type="x">a<b</script><ul><li>one<li>two</ul><svg>no</svg></body>"""
    text = parsed(tmp_path, "page.html", page)
    assert text.split("\n\n") == ["Grok", "About", "33 billion para\xadmeters & more", "one\ntwo"]


def test_tables_name_their_columns_in_each_row(tmp_path: Path) -> None:
    assert parsed(tmp_path, "a.csv", 'name,size\nGrok-0,"33 billion"\n') == "name: Grok-0; size: 33 billion"
    assert parsed(tmp_path, "a.tsv", "1\t2\n3\t4") == "1\t2\n3\t4"  # numbers are no names


def test_json_is_checked_and_indented(tmp_path: Path) -> None:
    assert parsed(tmp_path, "a.json", '{"a":[1,"ü"]}') == '{\n "a": [\n  1,\n  "ü"\n ]\n}'
    assert parsed(tmp_path, "a.json", r'"\ud800"') == '"?"'  # half a character cannot be stored


def test_pdf_pages_end_with_form_feeds(tmp_path: Path) -> None:
    text = parsed(tmp_path, "a.pdf", pdf(["first page\nsecond line", "Grok-0 has 33 billion parameters"]))
    assert text == "first page\nsecond line\fGrok-0 has 33 billion parameters"


def test_docx_paragraphs_are_lines(tmp_path: Path) -> None:
    assert parsed(tmp_path, "a.docx", docx(["one &amp; two", "three"])) == "one & two\nthree\n"


def test_a_pdf_of_a_hundred_pages_takes_seconds(tmp_path: Path) -> None:
    page = "\n".join(f"line {n} of a page with some words in it for reading" for n in range(50))
    started = time.monotonic()
    assert parsed(tmp_path, "a.pdf", pdf([page] * 100)).count("\f") == 99
    assert time.monotonic() - started < 10


ENCRYPTED = (
    b"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <" + b"41" * 32 + b"> /U <" + b"42" * 32 + b"> >> "
    b"/ID [<00> <00>]"
)


@pytest.mark.parametrize(
    ("name", "content", "code", "words"),
    [
        ("a.pdf", b"hello", "invalid_file", "ends in .pdf, but it is no PDF"),
        ("a.pdf", docx(["x"]), "invalid_file", "it is a zip archive"),
        ("a.txt", pdf(["x"]), "unsupported_file", "it is a PDF: let its name end in .pdf"),
        ("a.txt", b"a\0b", "unsupported_file", "no text"),
        ("a.txt", b"a" * 2000 + b"\0", "invalid_file", "a zero byte at character 2,000"),
        ("a.txt", b"caf\xe9", "invalid_file", "byte 3 is no UTF-8: save it as UTF-8"),
        ("a.txt", b" \n\t ", "invalid_file", "it holds no text"),
        ("a.png", b"\x89PNG", "unsupported_file", ".png files are not supported"),
        ("a.docx", b"PK\x03\x04broken", "invalid_file", "cannot be read as DOCX"),
        ("a.docx", docx_of(b"<w:p>"), "invalid_file", "its XML is broken"),
        ("a.docx", docx_of(b'<!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>'), "invalid_file", "defines entities"),
        ("a.pdf", pdf([""]), "invalid_file", "it holds no text: recognize the text of a scanned PDF first"),
        ("a.pdf", pdf(["x"], ENCRYPTED), "invalid_file", "it is encrypted: remove its password"),
        ("a.pdf", b"%PDF-1.4\nbroken", "invalid_file", "cannot be read as PDF"),
        ("a.json", b'{"a": ', "invalid_file", "no valid JSON"),
        ("a.json", b"[" * 100_000, "invalid_file", "nested too deep"),
        ("a.csv", b'a,b\n"open', "invalid_file", "no valid CSV"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_with_a_reason(
    tmp_path: Path, name: str, content: bytes, code: str, words: str
) -> None:
    with pytest.raises(ParseError) as raised:
        parsed(tmp_path, name, content)
    assert raised.value.code == code
    assert str(raised.value).startswith(f"{name}: ")
    assert words in str(raised.value)


def test_a_gigabyte_of_spaces_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "spaces"
    with path.open("wb") as file:
        file.truncate(1 << 30)  # a sparse file, of zeros …
        file.write(b" " * (1 << 20))  # … that begins with spaces
    started = time.monotonic()
    with pytest.raises(ParseError, match="20,000,000 characters are allowed: split it"):
        parse_file(path, "spaces.txt")
    assert time.monotonic() - started < 10


def test_a_zip_bomb_is_refused_within_its_limits(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    zip_bomb(path, 300)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ParseError, match="unpacks to more than 128 MiB") as raised:
        parse_file(path, "bomb.docx")
    assert raised.value.code == "invalid_file"


def test_limits_of_pages_characters_memory_and_time(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="it has 3 pages, and 2 are allowed"):
        parsed(tmp_path, "a.pdf", pdf(["x"] * 3), ParseLimits(max_pages=2))
    with pytest.raises(ParseError, match="it holds 11 characters of text, and 10 are allowed"):
        parsed(tmp_path, "a.txt", "x" * 11, ParseLimits(max_characters=10))
    with pytest.raises(ParseError, match="more than 128 MiB of memory"):
        parsed(tmp_path, "a.json", "[" + "[1]," * 2_000_000 + "1]", ParseLimits(memory_bytes=128 << 20))
    with pytest.raises(ParseError, match=r"takes more than 0\.05 s to read") as raised:
        parsed(tmp_path, "a.json", "[" + "[1]," * 2_000_000 + "1]", ParseLimits(seconds=0.05))
    assert raised.value.code == "invalid_file"
    assert parsed(tmp_path, "a.txt", "the next file is read") == "the next file is read"


def test_a_killed_process_is_replaced(tmp_path: Path) -> None:
    assert parsed(tmp_path, "a.txt", "before") == "before"
    reader = parsing._process._process
    assert reader is not None
    process = reader.process
    process.kill()
    process.wait()
    assert parsed(tmp_path, "a.txt", "after") == "after"


def test_threads_take_turns(tmp_path: Path) -> None:
    texts = {}

    def read(number: int) -> None:
        path = tmp_path / str(number)
        path.write_text(f"text {number}")
        texts[number] = parse_file(path, "a.txt")

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: f"text {number}" for number in range(8)}


def test_a_file_that_is_gone_is_no_fault_of_its_content(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="not there any more") as raised:
        parse_file(tmp_path / "gone", "gone.txt")
    assert raised.value.code == "server_error"
