"""Retriever: add files, search them, ask questions. `Retriever().add("notes.pdf").ask("…")` needs nothing set up."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from quire.core.errors import ConfigError, InvalidRequest
from quire.core.sampling import SamplingParams
from quire.llm.embedder import Embedder
from quire.llm.llm import LLM
from quire.rag.chunks import WINDOW, Chunk, check_chunking, chunk_text, windows
from quire.rag.filters import check_attributes, parse_filter
from quire.rag.library import CitedPassage, Library, LibraryFile, LibrarySettings, settings_in
from quire.rag.parse import ParseError, parse_file
from quire.rag.prompts import AskPrompt, ask_prompt
from quire.rag.ranking import IndexQuery, Ranker

CHUNK_TOKENS = WINDOW  # what the built-in encoder reads at once: short prompts, precise sources
CHUNK_OVERLAP = 64
EMBED_WINDOWS = 256  # that are embedded together
ANSWER_TOKENS = 256
ASK_THRESHOLD = 0.5  # of a passage's score: first by meaning or by words, or well placed in both


@dataclass(frozen=True, slots=True)
class SourcedAnswer:
    text: str
    sources: list[CitedPassage]  # that were in the prompt, the best first


@dataclass(frozen=True, slots=True)
class _Parsed:
    name: str
    digest: str
    text: str
    chunks: list[Chunk]
    windows: list[list[str]]  # of each chunk
    attributes: dict[str, Any]


class Retriever:
    """Files as passages that are found by meaning and by words.

    With a `folder` everything is kept there and found again. `embedder` and `llm` are models or their names; without
    them the built-in ones are loaded when they are first needed. Not thread-safe.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        embedder: Embedder | str | None = None,
        llm: LLM | str | None = None,
        max_tokens: int | None = None,
        overlap: int | None = None,
        use_tqdm: bool = True,
    ) -> None:
        """`max_tokens` and `overlap` are of chunks (254 and 64); a folder keeps its own."""
        path = None if folder is None else Path(folder)
        kept = None if path is None else settings_in(path)
        size = max_tokens or (kept.max_tokens if kept else CHUNK_TOKENS)
        usual = kept.overlap if kept else min(CHUNK_OVERLAP, size // 2)
        repeated = usual if overlap is None else overlap
        try:
            check_chunking(size, repeated, ("max_tokens", "overlap"))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._use_tqdm = use_tqdm
        self._own: list[Embedder | LLM] = []  # that are closed with the retriever
        self._llm = llm
        model = embedder if isinstance(embedder, str) else kept.model if kept else None
        self._embedder = embedder if isinstance(embedder, Embedder) else self._opened_embedder(model)
        vectors = self._embedder.report.vectors
        assert vectors is not None
        self.library = Library(
            path, LibrarySettings(self._embedder.report.model, model, vectors.width, size, repeated)
        )

    # ------------------------------------------------------------------ adding

    def add(
        self,
        *paths: str | Path,
        attributes: Mapping[str, Any] | None = None,
        on_file: Callable[[Path, ParseError | None], None] | None = None,
    ) -> "Retriever":
        """Adds files, and all files in folders. One that is there with the same content is passed over.

        A file that cannot be read is a ParseError, unless `on_file` is given: it is called for each file, with the
        error or None.
        """
        checked = _checked(attributes)

        def parsed() -> Iterator[_Parsed]:
            for path in files_in(paths):
                try:
                    made = self._parsed(path, checked)
                except ParseError as error:
                    if on_file is None:
                        raise
                    on_file(path, error)
                    continue
                if made is not None:
                    yield made
                if on_file is not None:
                    on_file(path, None)

        self._put_all(parsed())
        return self

    def add_text(self, text: str, name: str, attributes: Mapping[str, Any] | None = None) -> "Retriever":
        """Adds a text under a name, as the text of a file."""
        if not text.strip():
            raise InvalidRequest(f"the text {name!r} is empty: give some", "text")
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._put_all([self._cut(name, digest, text, _checked(attributes))])
        return self

    def remove(self, name: str) -> None:
        """Removes a file by the name that `files` has."""
        self.library.remove(name)

    def files(self) -> list[LibraryFile]:
        return self.library.files()

    # ------------------------------------------------------------------ searching and asking

    def search(
        self,
        query: str,
        k: int = 5,
        *,
        filters: Mapping[str, Any] | None = None,
        ranker: Ranker = "auto",
        embedding_weight: float = 1.0,
        text_weight: float = 1.0,
        score_threshold: float = 0.0,
    ) -> list[CitedPassage]:
        """The `k` best passages, the best first. `filters` are on attributes, in OpenAI's form."""
        if not query.strip():
            raise InvalidRequest("the query is empty: write what is to be found", "query")
        if not 1 <= k <= 1000:
            raise InvalidRequest(f"k={k} is outside 1 to 1000: change it", "k")
        try:
            wanted = None if filters is None else parse_filter(filters)
        except ValueError as error:
            raise InvalidRequest(str(error), "filters") from None
        vector = self._embedder.embed([query], use_tqdm=False, truncate=True)[0]
        return self.library.search(
            IndexQuery(vector, query, k, wanted, ranker, embedding_weight, text_weight, score_threshold)
        )

    def prompt(self, question: str, k: int = 3, max_tokens: int = ANSWER_TOKENS, **search: Any) -> AskPrompt:
        """The messages that ask the model with the best passages, and those passages."""
        if not len(self.library):
            raise InvalidRequest("there is nothing to search: add files first")
        llm = self.llm
        search.setdefault("score_threshold", ASK_THRESHOLD)
        room = min(llm.report.limits.max_model_len, llm.report.pool.num_tokens) - max_tokens
        return ask_prompt(question, self.search(question, k, **search), llm.tokenizer, room)

    def ask(
        self, question: str, k: int = 3, sampling: SamplingParams | None = None, **search: Any
    ) -> SourcedAnswer:
        """The model's answer from the `k` best passages. Further arguments are those of `search`."""
        sampling = sampling or SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
        messages, sources = self.prompt(question, k, sampling.max_tokens or ANSWER_TOKENS, **search)
        output = self.llm.chat([messages], sampling, use_tqdm=False)[0]
        return SourcedAnswer(output.outputs[0].text.strip(), sources)

    @property
    def llm(self) -> LLM:
        """The model that answers, loaded when it is first asked for."""
        if not isinstance(self._llm, LLM):
            self._llm = LLM(self._llm, use_tqdm=self._use_tqdm)
            self._own.append(self._llm)
        return self._llm

    def use_llm(self, llm: LLM) -> None:
        """The model that answers from now on; its owner closes it."""
        self._llm = llm

    def close(self) -> None:
        """Calling it twice is fine."""
        self.library.close()
        for model in self._own:
            model.close()

    def __enter__(self) -> "Retriever":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------

    def _opened_embedder(self, model: str | None) -> Embedder:
        embedder = Embedder(model, use_tqdm=self._use_tqdm)
        self._own.append(embedder)
        if embedder.tokenizer is None:
            raise ConfigError(
                f"{embedder.report.model} has no tokenizer, and passages are texts: choose another"
            )
        return embedder

    def _parsed(self, path: Path, attributes: dict[str, Any]) -> _Parsed | None:
        """None if the file is there already."""
        name = str(path)
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ParseError("server_error", f"{path}: it cannot be read ({error})") from error
        if self.library.holds(name, digest):
            return None
        return self._cut(name, digest, parse_file(path, name), attributes)

    def _cut(self, name: str, digest: str, text: str, attributes: dict[str, Any]) -> _Parsed:
        tokenizer, settings = self._embedder.tokenizer, self.library.settings
        assert tokenizer is not None
        chunks = chunk_text(text, tokenizer, settings.max_tokens, settings.overlap)
        longest = min(WINDOW, self._embedder.report.limits.max_model_len - 2)
        cut = [windows(chunk.text, tokenizer, longest) for chunk in chunks]
        return _Parsed(name, digest, text, chunks, cut, attributes)

    def _put_all(self, files: Iterable[_Parsed]) -> None:
        """Embeds the windows of several files together."""
        waiting: list[_Parsed] = []
        count = 0
        for file in files:
            waiting.append(file)
            count += sum(map(len, file.windows))
            if count >= EMBED_WINDOWS:
                self._put(waiting)
                waiting, count = [], 0
        self._put(waiting)

    def _put(self, files: Sequence[_Parsed]) -> None:
        texts = [window for file in files for chunk in file.windows for window in chunk]
        rows = iter(self._embedder.embed(texts, use_tqdm=False, truncate=True))
        for file in files:
            vectors = [numpy.stack([next(rows) for _ in chunk]) for chunk in file.windows]
            self.library.put(file.name, file.digest, file.text, file.chunks, vectors, file.attributes)


def files_in(paths: Sequence[str | Path]) -> Iterator[Path]:
    """The files, and those in folders and their folders, without hidden ones."""
    for path in map(Path, paths):
        if not path.exists():
            raise InvalidRequest(f"{path} is not there: check the name")
        if path.is_dir():
            inner = (file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file())
            yield from (path / file for file in inner if not any(part.startswith(".") for part in file.parts))
        else:
            yield path


def _checked(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        return check_attributes(attributes or {})
    except ValueError as error:
        raise InvalidRequest(str(error), "attributes") from None
