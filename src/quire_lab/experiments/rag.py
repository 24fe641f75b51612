"""`rag`: XQuAD's questions: which paragraphs are found, and what the model answers with and without them."""

import json
import re
import string
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams
from quire.llm.embedder import Embedder
from quire.llm.llm import LLM
from quire.rag.chunks import windows
from quire.rag.library import CitedPassage
from quire.rag.prompts import ask_prompt
from quire.rag.ranking import IndexQuery
from quire.rag.retriever import Retriever
from quire.rag.words import STOP_WORDS, stem
from quire_lab.report.experiment import Bar, Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import GREY, Picture, bar_style, line_style

METHODS = {  # weights of vectors and of words
    "BM25": (0.0, 1.0),
    "dense": (1.0, 0.0),
    "hybrid": (1.0, 1.0),
}
CHUNKS = ((800, 400), (254, 64), (100, 50))  # OpenAI's, the retriever's, small ones
KS = (1, 5, 20)
ANSWER_TOKENS = 40
RECALL_1, RECALL_5, TOLERANCE = 0.93, 0.99, 0.005
LECTURE_QUESTION, LECTURE_ANSWER = "How many parameters does Grok-0 have?", "33 billion"
LECTURE_FILES = {
    "grok.txt": "Grok-0 is a prototype language model that xAI trained with 33 billion parameters.",
    "bread.txt": "Bread is baked at about 230 degrees.",
}


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    paragraph: str  # the name of its file
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Searched:
    """How often the right paragraph is among the first k."""

    chunk: int  # tokens
    method: str
    recall: dict[int, float]


@dataclass(frozen=True, slots=True)
class Answered:
    chunk: int  # tokens
    method: str
    k: int  # passages in the prompt; 0: none
    exact_match: float
    f1: float
    contains: float  # the answer is somewhere in the text


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The lecture's question, which no small model knows the answer of, without and with a file that has it."""

    alone: str
    sourced: str
    source: str  # the file that is named first


def run(setup: Setup) -> Finding:
    paragraphs, questions = _xquad(setup)
    stride = max(1, len(questions) // setup.pick(4, 60, 300))
    asked = questions[::stride]
    encoder = {"device": setup.engine["device"]} if "device" in setup.engine else {}
    chunk_sizes = CHUNKS[: setup.pick(1, 3, 3)]
    with (
        setup.progress(len(chunk_sizes) * (len(METHODS) + 1) + 5, "part") as bar,
        Embedder(use_tqdm=False, **encoder) as embedder,
    ):
        bar.note("embedding the questions")
        vectors = embedder.embed([question.text for question in questions], use_tqdm=False, truncate=True)
        searched: list[Searched] = []
        references: dict[str, float] = {}
        pairs = list(zip(questions, vectors, strict=True))[::stride]
        kept: dict[tuple[int, str], list[list[CitedPassage]]] = {}  # passages for answers
        for chunk, overlap in chunk_sizes:
            bar.note(f"chunks of {chunk} tokens")
            with Retriever(embedder=embedder, max_tokens=chunk, overlap=overlap, use_tqdm=False) as retriever:
                for name, text in paragraphs.items():
                    retriever.add_text(text, name)
                searched += _searched(retriever, chunk, questions, vectors, bar)
                for method in METHODS if not references else ("hybrid",):
                    kept[chunk, method] = [_passages(retriever, *pair, 3, method) for pair in pairs]
                references = references or reference_recalls(embedder, paragraphs, questions, vectors)
        with _model(setup) as llm:
            usual = (chunk_sizes[0][0], "hybrid")
            answered = [_answered(llm, asked, kept[usual], usual, k, bar) for k in (0, 1, 3)]
            answered += [
                _answered(llm, asked, best, key, 1, bar) for key, best in kept.items() if key != usual
            ]
            shown = demonstration(llm, embedder)
    return _finding(setup, searched, answered, shown, references, len(paragraphs), len(questions), len(asked))


def demonstration(llm: LLM, embedder: Embedder) -> Demonstration:
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    chat: Any = [{"role": "user", "content": LECTURE_QUESTION}]
    alone = llm.chat([chat], greedy, use_tqdm=False)[0].outputs[0].text.strip()
    with Retriever(embedder=embedder, llm=llm, use_tqdm=False) as retriever:
        for name, text in LECTURE_FILES.items():
            retriever.add_text(text, name)
        answer = retriever.ask(LECTURE_QUESTION, sampling=greedy)
    return Demonstration(alone, answer.text, answer.sources[0].file if answer.sources else "")


def _xquad(setup: Setup) -> tuple[dict[str, str], list[Question]]:
    path = setup.data.path("xquad")
    if path is None:
        raise ConfigError("`rag` needs XQuAD's questions: give --data-dir a folder with xquad/xquad.en.json")
    return read_xquad(Path(path), setup.pick(1, 1000, 1000))


def read_xquad(path: Path, paragraphs_each: int = 1000) -> tuple[dict[str, str], list[Question]]:
    """The paragraphs by name, that many of each article at most, and the questions about them."""
    paragraphs: dict[str, str] = {}
    questions = []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"][:paragraphs_each]:
            name = f"paragraph {len(paragraphs)}"
            paragraphs[name] = paragraph["context"]
            for asked in paragraph["qas"]:
                answers = tuple(answer["text"] for answer in asked["answers"])
                questions.append(Question(asked["question"], name, answers))
    return paragraphs, questions


def _passages(
    retriever: Retriever, question: Question, vector: numpy.ndarray, k: int, method: str = "hybrid"
) -> list[CitedPassage]:
    return retriever.library.search(IndexQuery(vector, question.text, k, None, "auto", *METHODS[method]))


def _searched(
    retriever: Retriever, chunk: int, questions: Sequence[Question], vectors: numpy.ndarray, bar: Bar
) -> list[Searched]:
    made = []
    for method in METHODS:
        ranks = []
        for question, vector in zip(questions, vectors, strict=True):
            passages = _passages(retriever, question, vector, 4 * max(KS), method)
            files = list(dict.fromkeys(passage.file for passage in passages))
            ranks.append(
                files.index(question.paragraph) if question.paragraph in files else len(files) + 1000
            )
        made.append(Searched(chunk, method, {k: sum(rank < k for rank in ranks) / len(ranks) for k in KS}))
        bar()
    return made


def reference_recalls(
    embedder: Embedder, paragraphs: dict[str, str], questions: Sequence[Question], vectors: numpy.ndarray
) -> dict[str, float]:
    """recall@5 by other code on the same windows and paragraphs: plain cosines, and BM25 with dictionaries."""
    names, texts = list(paragraphs), list(paragraphs.values())
    assert embedder.tokenizer is not None
    parts = [windows(text, embedder.tokenizer) for text in texts]
    rows = embedder.embed([part for text in parts for part in text], use_tqdm=False, truncate=True)
    owners = numpy.repeat(numpy.arange(len(texts)), [len(text) for text in parts])
    by_window = vectors @ rows.T
    cosines = numpy.stack([by_window[:, owners == at].max(axis=1) for at in range(len(texts))], axis=1)
    counts = [Counter(_words(text)) for text in texts]
    average = sum(count.total() for count in counts) / len(counts)
    holding = Counter(word for count in counts for word in count)
    hits = {"dense": 0, "BM25": 0}
    for question, row in zip(questions, cosines, strict=True):
        scores = numpy.zeros(len(texts))
        for word in set(_words(question.text)):
            rarity = numpy.log(1 + (len(texts) - holding[word] + 0.5) / (holding[word] + 0.5))
            for at, count in enumerate(counts):
                if word in count:
                    length = count.total() / average
                    scores[at] += rarity * count[word] * 2.2 / (count[word] + 1.2 * (0.25 + 0.75 * length))
        right = names.index(question.paragraph)
        hits["dense"] += right in numpy.argsort(-row, kind="stable")[:5]
        hits["BM25"] += right in numpy.argsort(-scores, kind="stable")[:5]
    return {method: count / len(questions) for method, count in hits.items()}


def _words(text: str) -> list[str]:
    return [stem(word) for word in re.findall(r"[^\W_]+", text.lower()) if word not in STOP_WORDS]


@contextmanager
def _model(setup: Setup) -> Iterator[LLM]:
    settings = dict(setup.engine)
    with LLM(settings.pop("model", None), use_tqdm=False, **settings) as llm:
        yield llm


def _answered(
    llm: LLM,
    asked: Sequence[Question],
    passages: Sequence[list[CitedPassage]],
    searched: tuple[int, str],
    k: int,
    bar: Bar,
) -> Answered:
    """`searched` with chunks of a size, and by a method."""
    bar.note(f"answers with {k} passages, chunks of {searched[0]} tokens, {searched[1]}")
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    room = min(llm.report.limits.max_model_len, llm.report.pool.num_tokens) - ANSWER_TOKENS
    chats: list[Any] = []
    for question, best in zip(asked, passages, strict=True):
        alone = [{"role": "user", "content": question.text}]
        chats.append(ask_prompt(question.text, best[:k], llm.tokenizer, room).messages if k else alone)
    outputs = llm.chat(chats, greedy, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    scores = numpy.array(
        [
            [max(score(text, answer) for answer in question.answers) for score in (exact_match, f1, contains)]
            for text, question in zip(texts, asked, strict=True)
        ]
    ).mean(axis=0)
    bar()
    return Answered(*searched, k, *map(float, scores))


# ---------------------------------------------------------------------- SQuAD's scores


def plain(text: str) -> list[str]:
    """Words as SQuAD compares them: lower case, without punctuation and articles."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def exact_match(text: str, answer: str) -> float:
    return float(plain(text) == plain(answer))


def f1(text: str, answer: str) -> float:
    words, wanted = plain(text), plain(answer)
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted)) if common else 0.0


def contains(text: str, answer: str) -> float:
    return float(f" {' '.join(plain(answer))} " in f" {' '.join(plain(text))} ")


def _finding(
    setup: Setup,
    searched: list[Searched],
    answered: list[Answered],
    shown: Demonstration,
    references: dict[str, float],
    num_paragraphs: int,
    num_questions: int,
    num_asked: int,
) -> Finding:
    usual = {row.method: row for row in searched if row.chunk == CHUNKS[0][0]}
    hybrid = usual["hybrid"].recall
    by_k = [row for row in answered if (row.chunk, row.method) == (answered[0].chunk, answered[0].method)]
    alone, *with_passages = by_k
    best = max(with_passages, key=lambda row: row.contains)
    take_away = (
        f"Of {num_questions:,} questions, hybrid search finds the paragraph first for {hybrid[1]:.1%} and among five "
        f"for {hybrid[5]:.1%}. The model's text holds the answer for {alone.contains:.0%} of {num_asked} questions "
        f"alone, and for {best.contains:.0%} with {best.k} of the passages found."
    )
    checks = [
        Check(
            f"hybrid: recall@{k} of {least}",
            f"{hybrid[k]:.3f}",
            hybrid[k] >= least,
        )
        for k, least in ((1, RECALL_1), (5, RECALL_5))
    ]
    for method, reference in references.items():
        mine = usual[method].recall[5]
        claim = f"{method}: recall@5 within {TOLERANCE} of other code"
        checks.append(Check(claim, f"{mine:.4f} and {reference:.4f}", abs(mine - reference) <= TOLERANCE))
    claim = "the answer is in the text more often with passages than without"
    measured = f"{best.contains:.2f} against {alone.contains:.2f}"
    checks.append(Check(claim, measured, best.contains > alone.contains))
    claim = f"“{LECTURE_QUESTION}”: {LECTURE_ANSWER}, from grok.txt, and not without it"
    is_right = (
        LECTURE_ANSWER in shown.sourced and shown.source == "grok.txt" and LECTURE_ANSWER not in shown.alone
    )
    checks.append(Check(claim, f"“{shown.sourced}” against “{shown.alone}”", is_right))
    return Finding(
        take_away,
        [_search_table(searched), _answer_table(answered)],
        [
            Picture(
                "rag",
                "Answers with retrieval",
                f"{num_questions:,} questions about {num_paragraphs} paragraphs of XQuAD.",
                lambda figure: _draw(figure, searched, by_k),
                height=3.6,
            ),
            Picture(
                "rag-question",
                "A question that the model cannot answer alone",
                "The same model, without and with a file that is found and put into its prompt.",
                lambda figure: _draw_demonstration(figure, shown),
                height=2.6,
            ),
        ],
        {
            "found": [asdict(row) for row in searched],
            "answered": [asdict(row) for row in answered],
            "demonstration": asdict(shown),
            "references_recall_at_5": references,
        },
        {"seed": setup.seed, "questions": num_questions, "asked": num_asked, "answer_tokens": ANSWER_TOKENS},
        checks,
        (
            "a paragraph is a file; chunks of one file count as the file; hybrid is reciprocal rank fusion, k 60",
            "exact match and F1 as SQuAD scores them; a small chat model answers in sentences, so the share of texts "
            "that hold the answer is given beside them",
            "the references take the largest of plain cosines, and rank words with plain dictionaries",
        ),
    )


def _search_table(searched: list[Searched]) -> Table:
    rows = [[str(row.chunk), row.method, *(f"{row.recall[k]:.3f}" for k in KS)] for row in searched]
    return Table("Paragraphs found", ["chunk, tokens", "method", *(f"recall@{k}" for k in KS)], rows, left=2)


def _answer_table(answered: list[Answered]) -> Table:
    rows = [
        [
            row.method if row.k else "",
            str(row.chunk) if row.k else "",
            str(row.k),
            *(f"{share:.3f}" for share in (row.exact_match, row.f1, row.contains)),
        ]
        for row in answered
    ]
    head = ["method", "chunk, tokens", "passages", "exact match", "F1", "holds the answer"]
    return Table("Answers", head, rows)


def _draw_demonstration(figure: Any, shown: Demonstration) -> None:
    axis = figure.subplots()
    axis.axis("off")
    axis.text(0.5, 0.97, LECTURE_QUESTION, ha="center", va="top", fontsize=12, weight="bold")
    for left, title, answer, note in (
        (0.0, "the model alone", shown.alone, ""),
        (
            0.52,
            "with its files",
            shown.sourced,
            f"found: {shown.source}: {LECTURE_FILES.get(shown.source, '')}",
        ),
    ):
        axis.text(left, 0.74, title, va="top", fontsize=10, color=GREY)
        axis.text(left, 0.6, textwrap.fill(answer, 44), va="top", fontsize=10)
        axis.text(left, 0.12, textwrap.fill(note, 56), va="top", fontsize=8, color=GREY)


def _draw(figure: Any, searched: list[Searched], answered: list[Answered]) -> None:
    left, right = figure.subplots(1, 2)
    usual = [row for row in searched if row.chunk == CHUNKS[0][0]]
    for series, row in enumerate(usual):
        left.plot(KS, list(row.recall.values()), label=row.method, **line_style(series))
    left.set(title="the right paragraph is found", xlabel="passages (k)", ylabel="recall@k", xticks=KS)
    left.legend(loc="lower right")
    places = numpy.arange(len(answered))
    for series, (name, words) in enumerate((("f1", "F1"), ("contains", "holds the answer"))):
        values = [getattr(row, name) for row in answered]
        right.bar(places + 0.4 * series, values, width=0.36, label=words, **bar_style(series))
    right.set(title="the model's answers", ylabel="share of questions", xlabel="passages in the prompt")
    right.set_xticks(places + 0.2, ["none", *(str(row.k) for row in answered[1:])])
    right.legend(loc="upper left")


EXPERIMENT = Experiment(
    "rag",
    "Answers from documents",
    "A small model knows little. What does it answer when the right paragraph is found and put into its prompt?",
    run,
)
