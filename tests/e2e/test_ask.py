"""Retriever, `quire ask` and `quire index` with the built-in models: answers come with their source."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rag.files import pdf

from quire import LLM, Embedder, Retriever, SamplingParams
from quire.cli.main import main
from quire.core.errors import ConfigError, InvalidRequest, WeightsError
from quire.rag.parse import ParseError
from quire.weights.builtin import builtin_encoder_folder, builtin_path

QUESTION = "How many parameters does Grok-0 have?"
GROK = (
    "Grok-0 is a prototype language model that xAI trained with 33 billion parameters. It approaches LLaMA 2 (70B) "
    "on standard benchmarks, and uses half of its training resources."
)
OTHERS = {
    "bread.md": "# Bread\n\nBread is baked at about 230 degrees for forty minutes.",
    "rivers.txt": "The Danube is the second longest river in Europe. It flows through ten countries.",
    "page.html": "<h1>Gardens</h1><p>Roses are planted in autumn.</p><script>Grok-0 has 5 parameters</script>",
}


@pytest.fixture(scope="module")
def embedder() -> Iterator[Embedder]:
    try:
        builtin_encoder_folder()
        builtin_path()
    except WeightsError as error:
        pytest.skip(f"the built-in models are not here and cannot be fetched: {error}")
    with Embedder(use_tqdm=False) as made:
        yield made


@pytest.fixture(scope="module")
def llm(embedder: Embedder) -> Iterator[LLM]:
    with LLM(use_tqdm=False, num_blocks=256) as made:
        yield made


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, text in OTHERS.items():
        (folder / name).write_text(text)
    (folder / "grok.pdf").write_bytes(
        pdf(["About this report", GROK.replace("(", "\\(").replace(")", "\\)")])
    )
    (folder / ".hidden.txt").write_text("not this one")
    return folder


def test_the_answer_comes_from_the_file_and_names_it(files: Path, embedder: Embedder, llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=64)
    alone = llm.chat([[{"role": "user", "content": QUESTION}]], greedy, use_tqdm=False)[0].outputs[0].text
    assert "33 billion" not in alone
    with Retriever(embedder=embedder, llm=llm).add(files) as retriever:
        answer = retriever.ask(QUESTION, k=2, sampling=greedy)
    assert "33 billion" in answer.text
    (source,) = answer.sources  # passages that do not fit are left out
    assert source.file == str(files / "grok.pdf")
    assert source.position == "page 1"
    assert "33 billion" in source.text


def test_passages_have_positions_and_attributes(embedder: Embedder) -> None:
    text = "\n".join(f"Line {n} is about nothing." for n in range(1, 200)) + f"\n{GROK}\n"
    with Retriever(embedder=embedder, max_tokens=100, overlap=20) as retriever:
        retriever.add_text(text, "notes", {"year": 2023}).add_text("Roses are red.", "roses", {"year": 1999})
        best = retriever.search("parameters of Grok-0", 1)[0]
        assert best.file == "notes"
        assert text[best.start : best.end] == best.text
        assert text.split("\n")[best.line - 1] == best.text.split("\n")[0]
        old = {"type": "lt", "key": "year", "value": 2000}
        assert {passage.file for passage in retriever.search("Grok-0", 5, filters=old)} == {"roses"}
        retriever.remove("notes")
        assert [file.name for file in retriever.files()] == ["roses"]


def test_a_folder_is_kept_and_its_index_is_made_again(
    files: Path, embedder: Embedder, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    with Retriever(folder, embedder=embedder) as retriever:
        retriever.add(files)
        before = retriever.search(QUESTION, 3)
    for made in (folder / "index").iterdir():
        made.unlink()
    with Retriever(folder, embedder=embedder) as retriever:
        assert retriever.search(QUESTION, 3) == before
        (files / "bread.md").write_text("Grok-0 is not mentioned any more.")
        seen: list[Path] = []
        retriever.add(files, on_file=lambda path, _: seen.append(path))
        assert len(retriever.files()) == len(seen) == 4  # the changed one is replaced
        assert any("not mentioned" in passage.text for passage in retriever.search("mentioned", 2))
    with pytest.raises(ConfigError, match=r"was made with max_tokens=254, and now it is 400"):
        Retriever(folder, embedder=embedder, max_tokens=400)


def test_bad_input_is_named(files: Path, embedder: Embedder, tmp_path: Path) -> None:
    with Retriever(embedder=embedder) as retriever:
        with pytest.raises(InvalidRequest, match="add files first"):
            retriever.prompt(QUESTION)
        with pytest.raises(InvalidRequest, match="gone is not there"):
            retriever.add(tmp_path / "gone")
        (files / "broken.pdf").write_bytes(b"%PDF-1.4\nbroken")
        with pytest.raises(ParseError, match=r"broken\.pdf: it cannot be read as PDF"):
            retriever.add(files / "broken.pdf")
        refused: list[str] = []
        retriever.add(files, on_file=lambda path, error: refused.append(path.name) if error else None)
        assert refused == ["broken.pdf"]
        assert len(retriever.files()) == 4
        for wrong, words in (
            ({"query": " "}, "the query is empty"),
            ({"query": "x", "k": 0}, "k=0 is outside 1 to 1000"),
            ({"query": "x", "filters": {"type": "is"}}, r"filters\.type is 'is'"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                retriever.search(**wrong)
        with pytest.raises(InvalidRequest, match=r"attributes\.a is None"):
            retriever.add_text("x", "x", {"a": None})
    with pytest.raises(ConfigError, match="overlap is 300: give 0 to 250"):
        Retriever(embedder=embedder, max_tokens=500, overlap=300)


def test_the_command_line(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], llm: LLM) -> None:
    (files / "photo.png").write_bytes(b"\x89PNG")
    folder = str(tmp_path / "index")
    assert main(["index", "add", folder, str(files)]) == 2  # one file was refused
    captured = capsys.readouterr()
    assert f"{files / 'photo.png'}: .png files are not supported" in captured.err
    assert captured.out == "4 files read; the index has 4 files and 4 passages\n"
    assert main(["index", "list", folder]) == 0
    assert "grok.pdf" in capsys.readouterr().out
    assert main(["index", "search", folder, QUESTION, "-k", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["file"].endswith("grok.pdf")
    flags = ["--num-blocks", "128", "--max-tokens", "48", "--quiet"]
    assert main(["ask", QUESTION, "--index", folder, "-k", "1", *flags]) == 0
    out = capsys.readouterr().out
    assert "33 billion" in out
    assert "sources:\n  [1] " in out
    assert "grok.pdf, page" in out
    assert main(["index", "remove", folder, str(files / "grok.pdf")]) == 0
    assert "3 are left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ask", "why?"], "there is nothing to read: name files"),
        (["ask", "why?", "gone.txt"], "gone.txt is not there"),
        (["ask", "why?", "README.md", "--chunk-size", "5"], "--chunk-size is 5: give 100 to 4096"),
        (["index", "list", "nowhere"], "nowhere holds no index: `quire index add nowhere FILE` makes one"),
        (["index", "search", "nowhere", "x", "--filter", "{"], "--filter is no valid JSON"),
        (
            ["ask", "why?", "--index", "nowhere"],
            "nowhere holds no index: `quire index add nowhere FILE` makes",
        ),
        (["index", "add", "README.md", "docs"], "README.md is a file: give the folder of an index"),
    ],
)
def test_wrong_words_on_the_command_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not Path("nowhere").exists()


def test_an_index_that_sqlite_cannot_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "library.sqlite").write_text("no database")
    assert main(["index", "list", str(tmp_path / "broken")]) == 2
    assert "library.sqlite is no index (file is not a database): remove it" in capsys.readouterr().err
    (tmp_path / "closed" / "library.sqlite").mkdir(parents=True)
    assert main(["index", "add", str(tmp_path / "closed"), "README.md"]) == 1
    assert "closed cannot be used (" in capsys.readouterr().err
