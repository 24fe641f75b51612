"""Load for a server: questions whose answers are known, asked again and again, every answer compared."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.bench.serve import Outcome, StreamedCall, make_call
from quire.link.http_client import HttpClient

THINGS = ("a river", "an old clock", "the moon", "seven ducks", "a small town", "bread", "a storm", "numbers")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Question:
    """A seeded request, half of them chats; its answer is drawn, so that no two are alike."""

    number: int

    @property
    def text(self) -> str:
        return f"Write a line about {THINGS[self.number % len(THINGS)]}, the {self.number}th of many:"

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": 1.0, "top_p": 0.95, "seed": self.number, "max_tokens": 6 + self.number % 13}

    @property
    def is_chat(self) -> bool:
        return self.number % 2 == 1

    def call(self, **changes: Any) -> StreamedCall:
        asked: dict[str, Any] = {"prompt": self.text}
        if self.is_chat:
            asked = {"messages": [{"role": "user", "content": self.text}]}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return StreamedCall(CHAT if self.is_chat else TEXT, {**asked, **self.sampling, **stream, **changes})


@dataclass(frozen=True, slots=True)
class Answered:
    text: str
    num_tokens: int
    finish_reason: str | None


def offline_answers(questions: Sequence[Question]) -> dict[Question, Answered]:
    """What the engine in this process says, one batch of texts and one of chats."""
    found = {}
    with LLM(use_tqdm=False, num_blocks=512, max_num_seqs=64) as llm:
        for is_chat in (False, True):
            asked = [one for one in questions if one.is_chat is is_chat]
            samplings = [SamplingParams(**one.sampling) for one in asked]
            if is_chat:
                chats = [[{"role": "user", "content": one.text}] for one in asked]
                results = llm.chat(chats, samplings, use_tqdm=False)
            else:
                results = llm.generate([one.text for one in asked], samplings, use_tqdm=False)
            for one, result in zip(asked, results, strict=True):
                output = result.outputs[0]
                found[one] = Answered(output.text, len(output.token_ids), output.finish_reason)
    return found


@dataclass(slots=True)
class Tally:
    """What became of every request: `ends` counts "right", or the error's kind."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0  # of complete answers

    @property
    def total(self) -> int:
        return self.ends.total()

    @property
    def right(self) -> int:
        return self.ends["right"]

    def take(self, question: Question, outcome: Outcome, answers: dict[Question, Answered]) -> None:
        if outcome.error is not None:
            self.ends[outcome.error] += 1
            return
        self.num_tokens += outcome.num_output_tokens
        found = Answered(outcome.text, outcome.num_output_tokens, outcome.finish_reason)
        if found == answers[question]:
            self.ends["right"] += 1
        else:
            self.ends["wrong"] += 1
            self.wrong.append(f"{question.number}: {found} instead of {answers[question]}")


async def ask_for(
    seconds: float, client: HttpClient, num_streams: int, answers: dict[Question, Answered], pause: float
) -> Tally:
    """`ask_while` for that long."""
    tally, deadline = Tally(), time.monotonic() + seconds
    await ask_while(lambda: time.monotonic() < deadline, tally, client, num_streams, answers, pause)
    return tally


async def ask_while(
    goes_on: Callable[[], bool],
    tally: Tally,
    client: HttpClient,
    num_streams: int,
    answers: dict[Question, Answered],
    pause: float,
) -> None:
    """`num_streams` streams at a time, each asking the next question as soon as it has an answer.

    One that is refused comes again after `pause`. Returns when the last answer has ended.
    """
    questions = list(answers)

    async def stream(number: int) -> None:
        while goes_on():
            question = questions[number % len(questions)]
            number += num_streams + 1  # another one each time
            outcome = await make_call(client, question.call(), timeout=240)
            tally.take(question, outcome, answers)
            if outcome.error is not None:
                await asyncio.sleep(pause)

    await asyncio.gather(*(stream(number) for number in range(num_streams)))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
