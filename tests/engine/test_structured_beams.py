"""Beams keep to a form: each has a place of its own in the grammar, and the search is that of one written out."""

import zlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from quire import LLM
from quire.core.config import SchedulerConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.core.step import BeamCandidates, BeamSet
from quire.core.structured import StructuredOutput
from quire.engine.engine import Engine
from quire.engine.structured import StructuredOutputs
from quire.engine.validation import Limits
from quire.grammar.compiler import Compiler
from quire.grammar.matcher import GrammarError
from quire.grammar.vocabulary import Vocabulary
from quire.memory.paged import PagedMemory
from quire.runner.runner import Runner
from tests.engine.page_runner import best_of
from tests.engine.test_device_runner import DeviceRunner
from tests.engine.test_structured import (
    END,
    FORMS,
    SIZE,
    VOCABULARY,
    MaskedPageRunner,
    allowed_in,
    expected,
    run,
)
from tests.models.checkpoints import VARIANTS, VOCAB, save

GROWING = StructuredOutput.regex("[ab]{2,}")  # whole after two, and never beyond growing


def token_scores(token_ids: Sequence[int]) -> list[float]:
    """Log probabilities; multiples of 1/64, so that sums are exact and ties happen. To end is a little likelier."""
    text = zlib.crc32(",".join(map(str, token_ids)).encode())
    return [
        -1.0 - (text ^ 2654435761 * token) % 251 / 64 * (0.5 if token == END else 1) for token in range(SIZE)
    ]


class BeamRunner(MaskedPageRunner):
    """Candidates are those that the step's mask allows."""

    def candidates(self, beams: BeamSet, contexts: list[list[int]]) -> BeamCandidates:
        masked = {}
        if self.masks:
            masked = dict(zip(self.masks[0].indices.tolist(), self.masks[0].bits, strict=True))
        found = [
            (score + self.token_scores(contexts[index])[token], index, int(token))
            for index, score in zip(beams.samples, beams.scores, strict=True)
            for token in (allowed_in(masked[index]) if index in masked else range(SIZE))
        ]
        return best_of(found, beams)


@pytest.fixture(scope="module")
def compiler():
    made = Compiler(lambda: VOCABULARY)
    for form in (*FORMS[1:], GROWING):
        made.submit(form).result(30)
    yield made
    made.close()


def make_engine(compiler, in_flight: int, num_blocks: int, max_tokens: int) -> Engine:
    memory = PagedMemory(num_blocks, 4, "test", num_swap_blocks=0)
    config = SchedulerConfig(12, max_tokens, steps_in_flight=in_flight)
    runner = BeamRunner(num_blocks, 4)
    runner.token_scores = token_scores
    return Engine(config, Limits(SIZE, 64, 12, (END,)), memory, runner, 0, lambda: compiler)


def expected_beams(
    compiler, prompt: list[int], asked: SamplingParams, scores_of=token_scores, num_words=VOCABULARY.num_words,
    ends=(END,),
) -> list[tuple[list[int], str]]:  # fmt: skip
    """Every candidate's text is matched from its beginning; nothing is forked."""
    width, penalty = asked.num_sequences, asked.length_penalty
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int], str]] = []
    for length in range(1, asked.max_tokens + 1):
        found = []
        for score, output in beams:
            matcher = compiler.submit(asked.structured).result().matcher()
            matcher.advance(output)
            bits = np.zeros(num_words, np.uint32)
            matcher.fill(bits)
            scores = scores_of([*prompt, *output])
            found += [(score + scores[token], [*output, int(token)]) for token in allowed_in(bits)]
        found = sorted(found, key=lambda one: -one[0])[: max(2, 1 + len(ends)) * width]
        beams = []
        for place, (score, output) in enumerate(found):
            stops = output[-1] in ends
            if not stops:
                matcher = compiler.submit(asked.structured).result().matcher()
                matcher.advance(output)
                stops = matcher.is_terminated
            if not stops and length < asked.max_tokens:
                beams.append((score, output))
            elif place < width:
                ended.append((score / length**penalty, output, "stop" if stops else "length"))
        beams = beams[:width]
        ended = sorted(ended, key=lambda one: -one[0])[:width]
        full = len(ended) == width
        if not beams or (full and (asked.early_stopping is True or width == 1)):
            break
        if full and beams[0][0] / length**penalty <= ended[-1][0]:
            break
    answers = [(output, reason) for _, output, reason in ended]
    return (answers + [([], "length")] * width)[: asked.n]


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize(("num_blocks", "max_tokens"), [(96, 64), (18, 9)], ids=["room", "preempting"])
def test_the_hypotheses_are_those_of_a_search_written_out(compiler, in_flight, num_blocks, max_tokens):
    engine = make_engine(compiler, in_flight, num_blocks, max_tokens)
    wanted = {}
    forms = [*FORMS[1:], GROWING]
    for i in range(16):
        prompt, limit = [5, 6, 7, 8, 9][: 1 + i % 5] + [10 + i] * (1 + i % 3), (3, 8, 14)[i % 3]
        asked = SamplingParams(
            n=(1, 2, 3)[i % 3], best_of=(1, 2, 3, 4)[i // 4] if i >= 8 else 3, use_beam_search=True, max_tokens=limit,
            length_penalty=(1.0, 0.0)[i % 2], early_stopping=i % 5 == 0, structured=forms[i % 4],
        )  # fmt: skip
        engine.add(Request(f"b{i}", prompt, asked))
        for index, answer in enumerate(expected_beams(compiler, prompt, asked)):
            wanted[f"b{i}", index] = answer
        if i % 4 == 0:  # others beside them, with a form and without
            form = FORMS[i // 4]
            engine.add(Request(f"s{i}", prompt, SamplingParams(max_tokens=limit, structured=form)))
            wanted[f"s{i}", 0] = expected(compiler, prompt, form, 0, limit)
    assert run(engine) == wanted
    assert (engine.scheduler.stats.num_preemptions > 0) == (num_blocks == 18)
    assert {reason for _, reason in wanted.values()} == {"stop", "length"}


@pytest.mark.parametrize("runner", [Runner, DeviceRunner])
def test_a_models_beams_are_those_of_a_search_written_out(tmp_path, monkeypatch, runner):
    model = save(tmp_path, VARIANTS["llama"]())
    monkeypatch.setattr("quire.engine.build.runner.Runner", runner)
    letters = [bytes([31 + token]) for token in range(VOCAB)]

    def scores_of(context: list[int]) -> list[float]:
        with torch.inference_mode():
            return model(torch.tensor([context])).logits[0, -1].log_softmax(-1).tolist()

    with LLM(str(tmp_path), dtype="float32", quantization="none", use_tqdm=False) as llm:
        ends = llm.engine.limits.eos_token_ids
        vocabulary = Vocabulary(letters, frozenset(ends), ends)
        compiler = Compiler(lambda: vocabulary)
        monkeypatch.setattr(llm.engine._structured, "_make_compiler", lambda: compiler)
        for form in (StructuredOutput.regex("[a-f]{2,5}(x|yz)"), StructuredOutput.regex("(ab?|c)+")):
            prompts = [[5, 9, 33, 40], [7] * 3]
            asked = SamplingParams(n=4, use_beam_search=True, max_tokens=7, structured=form)
            for prompt, result in zip(prompts, llm.generate(prompts, asked, use_tqdm=False), strict=True):
                wanted = expected_beams(compiler, prompt, asked, scores_of, vocabulary.num_words, ends)
                assert [(one.token_ids, one.finish_reason) for one in result.outputs] == wanted
                assert all(one.token_ids for one in result.outputs)


def test_a_whole_text_ends_at_once_whatever_min_tokens_and_ignore_eos_say(compiler):
    engine = make_engine(compiler, 1, 64, 64)
    for i, settings in enumerate(({"min_tokens": 9}, {"ignore_eos": True})):
        asked = SamplingParams(
            n=2, use_beam_search=True, max_tokens=12, structured=StructuredOutput.choice(["yes", "nobody"]), **settings,
        )  # fmt: skip
        engine.add(Request(str(i), [5 + i, 6], asked))
    for tokens, reason in run(engine).values():
        assert bytes(token - 1 for token in tokens) in (b"yes", b"nobody")
        assert reason == "stop"


def test_a_grammar_that_passes_its_bounds_fails_its_request_alone(compiler, monkeypatch):
    def too_much(self, beam, token_id):
        raise GrammarError("too much")

    monkeypatch.setattr(StructuredOutputs, "continued", too_much)
    engine = make_engine(compiler, 1, 64, 64)
    engine.add(
        Request("b", [5, 6], SamplingParams(n=2, use_beam_search=True, max_tokens=8, structured=FORMS[1]))
    )
    engine.add(Request("s", [5, 6], SamplingParams(max_tokens=8, structured=FORMS[1])))
    found = run(engine)
    assert found["b", 0] == ([], "error") == found["b", 1]
    assert found["s", 0] == expected(compiler, [5, 6], FORMS[1], 0, 8)
