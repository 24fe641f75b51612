"""Grammars in the engine: whatever is shared, preempted, forked or aborted, a sequence keeps to its form."""

import threading
import zlib
from collections import deque

import numpy as np
import pytest

from quire.core.config import SchedulerConfig
from quire.core.errors import InvalidRequest
from quire.core.request import Request, ints
from quire.core.sampling import SamplingParams
from quire.core.step import Step, StepResult
from quire.core.structured import StructuredOutput
from quire.engine.engine import Engine
from quire.engine.validation import Limits
from quire.grammar.closing import HORIZON
from quire.grammar.compiler import Compiler
from quire.grammar.vocabulary import Vocabulary
from quire.memory.paged import PagedMemory
from tests.engine.page_runner import PageRunner

END = 0
VOCABULARY = Vocabulary([b"<end>", *(bytes([byte]) for byte in range(256))], frozenset({END}), (END,))
SIZE = len(VOCABULARY.tokens)
FORMS = [
    None,
    StructuredOutput.regex("(ab|c){1,9}d"),
    StructuredOutput.json({"type": "array", "items": {"enum": [1, 22, "x"]}, "minItems": 1, "maxItems": 4}),
    StructuredOutput.choice(["yes", "no", "nobody"]),
]


def choose(context: list[int], sample_index: int, allowed: np.ndarray) -> int:
    """Any of the allowed tokens, by the context alone."""
    text = ",".join(map(str, context)) + f"/{sample_index}"
    return int(allowed[zlib.crc32(text.encode()) % len(allowed)])


def allowed_in(bits: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


class MaskedPageRunner(PageRunner):
    """Reads pages as its parent does, and takes no token that a mask forbids."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.masks: deque = deque()

    def mask(self, mask) -> None:
        assert sum(1 for step, _ in self.launched if step.masked) == len(self.masks) + 1
        self.masks.append(mask)

    def run(self, step: Step) -> StepResult:
        drawn = super().run(step)
        every = np.arange(1, SIZE)
        rows = {}
        if step.masked:
            mask = self.masks.popleft()
            assert set(mask.indices) <= set(step.masked)
            rows = {int(index): allowed_in(bits) for index, bits in zip(mask.indices, mask.bits, strict=True)}
        tokens = []
        for index, row in enumerate(step.sample_rows):
            context = self.tokens[row][:-1]
            token = choose(context, self.rows[row].sample_index, rows.get(index, every))
            self.tokens[row][-1] = token
            tokens.append(token)
        assert len(tokens) == len(drawn.token_ids)
        return StepResult(step.step_id, ints(tokens), beams=drawn.beams)


@pytest.fixture(scope="module")
def compiler():
    made = Compiler(lambda: VOCABULARY)
    for form in FORMS[1:]:
        made.submit(form).result(30)
    yield made
    made.close()


def make_engine(
    compiler, in_flight: int, *, num_blocks: int = 64, max_tokens: int = 16, rows: int = 12
) -> Engine:
    memory = PagedMemory(num_blocks, 4, "test", num_swap_blocks=64 * in_flight)
    config = SchedulerConfig(rows, max_tokens, steps_in_flight=in_flight)
    limits = Limits(SIZE, 64, rows, (END,))
    return Engine(config, limits, memory, MaskedPageRunner(num_blocks, 4), 0, lambda: compiler)


def expected(compiler, prompt: list[int], form, sample_index: int, max_tokens: int) -> tuple[list[int], str]:
    grammar = None if form is None else compiler.submit(form).result()
    matcher = None if grammar is None else grammar.matcher()
    context = list(prompt)
    for left in range(max_tokens, 0, -1):
        allowed = np.arange(1, SIZE)
        reason = "stop"
        if matcher is not None:
            bits = np.zeros(VOCABULARY.num_words, np.uint32)
            matcher.fill(bits)
            allowed = allowed_in(bits)
            ending = (
                grammar.closer.token_to_end(matcher, left) if grammar.closer and left <= HORIZON else None
            )
            if ending is not None:
                allowed, reason = np.array([ending]), "length"
        context.append(choose(context, sample_index, allowed))
        if context[-1] == END:
            return context[len(prompt) :], "stop"
        if matcher is not None:
            matcher.advance([context[-1]])
            if matcher.is_terminated:
                return context[len(prompt) :], reason
    return context[len(prompt) :], "length"


def run(engine: Engine) -> dict:
    found: dict = {}
    for _ in range(5000):
        if not engine.has_work:
            break
        for update in engine.step():
            tokens, _ = found.get((update.request_id, update.index), ([], None))
            found[update.request_id, update.index] = (tokens + list(update.token_ids), update.finish_reason)
    assert not engine.has_work
    engine.check_integrity()
    assert engine.memory.num_free == engine.memory.num_blocks
    assert not engine._structured.running, "a grammar's places are given up with its request"
    return found


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize(("num_blocks", "max_tokens"), [(64, 64), (17, 7)], ids=["room", "preempting"])
def test_tokens_are_the_same_whatever_else_happens(compiler, in_flight, num_blocks, max_tokens):
    engine = make_engine(compiler, in_flight, num_blocks=num_blocks, max_tokens=max_tokens)
    wanted = {}
    for i in range(24):
        form, n = FORMS[i % 4], (1, 1, 2, 3)[i // 4 % 4]
        prompt = [5, 6, 7, 8, 9][: 1 + i % 5] + [10 + i] * (1 + i % 3)
        limit = (4, 12, 20)[i % 3]
        engine.add(Request(f"r{i}", prompt, SamplingParams(n=n, max_tokens=limit, structured=form)))
        for index in range(n):
            wanted[f"r{i}", index] = expected(compiler, prompt, form, index, limit)
    assert run(engine) == wanted
    assert (engine.scheduler.stats.num_preemptions > 0) == (num_blocks == 17)
    assert {reason for _, reason in wanted.values()} == {"stop", "length"}


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_whole_text_ends_at_once_whatever_end_tokens_and_min_tokens_say(compiler, in_flight):
    engine = make_engine(compiler, in_flight)
    form = FORMS[3]
    engine.add(Request("a", [5], SamplingParams(max_tokens=30, min_tokens=20, structured=form)))
    engine.add(Request("b", [5], SamplingParams(max_tokens=30, ignore_eos=True, structured=form)))
    for tokens, reason in run(engine).values():
        text = b"".join(VOCABULARY.tokens[one] for one in tokens if one != END).decode()
        assert (text in ("yes", "no", "nobody"), reason) == (True, "stop")


@pytest.mark.parametrize("in_flight", [0, 1])
def test_others_run_while_a_grammar_compiles_and_an_abort_frees_its_place(in_flight):
    go_on = threading.Event()
    slow = Compiler(lambda: go_on.wait(30) and VOCABULARY)
    engine = make_engine(slow, in_flight)
    try:
        engine.add(Request("slow", [5], SamplingParams(max_tokens=8, structured=FORMS[1])))
        engine.add(Request("gone", [5], SamplingParams(max_tokens=8, structured=FORMS[1])))
        engine.add(
            Request(
                "wrong",
                [5],
                SamplingParams(n=2, max_tokens=8, structured=StructuredOutput.regex("(", param="regex")),
            )
        )
        engine.add(Request("plain", [5], SamplingParams(max_tokens=8)))
        with pytest.raises(InvalidRequest, match="already being served"):
            engine.add(Request("slow", [5], SamplingParams()))
        updates = []
        while not any(update.finish_reason for update in updates):
            updates += engine.step()
        assert {update.request_id for update in updates} == {"plain"}
        assert engine.num_compiling == 3
        assert engine.abort("gone")
        assert not engine.abort("gone")
        assert engine.has_work
        go_on.set()
        updates = []
        while engine.has_work:
            updates += engine.step()
        assert {update.request_id for update in updates} == {"slow", "wrong"}
        wrong = [update for update in updates if update.request_id == "wrong"]
        assert [(update.index, update.finish_reason, update.param) for update in wrong] == [
            (0, "error", "regex"),
            (1, "error", "regex"),
        ]
        assert "unclosed group" in wrong[0].error
        with pytest.raises(InvalidRequest, match="unclosed group"):
            engine.add(Request("wrong again", [5], SamplingParams(structured=StructuredOutput.regex("("))))
        engine.check_integrity()
    finally:
        go_on.set()
        engine.close()


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_grammar_that_passes_its_bounds_fails_its_request_alone(compiler, in_flight):
    engine = make_engine(compiler, in_flight)
    # compiles, but costs too much from its first token on
    heavy = StructuredOutput.regex("(a?){3000}a{3000}")
    compiler.submit(heavy).result(30)
    engine.add(Request("heavy", [5], SamplingParams(max_tokens=30, structured=heavy)))
    engine.add(Request("light", [5, 6], SamplingParams(max_tokens=30, structured=FORMS[1])))
    found = run(engine)
    assert found["heavy", 0][1] == "error"
    assert found["light", 0] == expected(compiler, [5, 6], FORMS[1], 0, 30)


def test_without_a_compiler_a_form_is_refused():
    engine = Engine(
        SchedulerConfig(4, 16),
        Limits(SIZE, 64, 4, (END,)),
        PagedMemory(16, 4, "test"),
        MaskedPageRunner(16, 4),
    )
    with pytest.raises(InvalidRequest, match="not available"):
        engine.add(Request("a", [5], SamplingParams(structured=FORMS[1])))
