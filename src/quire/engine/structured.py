"""StructuredOutputs: compiles grammars of requests, advances them with their sequences, makes masks for steps."""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

import numpy as np

from quire.core.draft import TokenTree, depths
from quire.core.errors import InvalidRequest, QuireError
from quire.core.request import FinishReason, Phase, Request, Sequence
from quire.engine.validation import Limits
from quire.grammar.closing import HORIZON
from quire.grammar.compiler import Compiler, Grammar
from quire.grammar.matcher import GrammarError, Matcher
from quire.sampling.records import TokenMask
from quire.scheduler.plan import ScheduledStep
from quire.speculate.tree import branches, merged


@dataclass(slots=True)
class _Structured:
    """A request's compiled grammar, and its state for each sequence."""

    grammar: Grammar
    matchers: dict[int, Matcher] = field(default_factory=dict)  # by sequence index


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests whose compilation has ended."""

    ready: list[Request]
    failed: list[tuple[Request, QuireError]]


class StructuredOutputs:
    """Used by the engine's thread alone. A cached grammar costs an arrival nothing."""

    def __init__(self, make_compiler: Callable[[], Compiler] | None, limits: Limits) -> None:
        self._make_compiler = make_compiler
        self._compiler: Compiler | None = None
        self.compiling: dict[str, tuple[Request, Future[Grammar]]] = {}  # by request id, as `running`
        self.running: dict[str, _Structured] = {}
        self._num_words = -(-limits.vocab_size // 32)
        self._end_ids = np.array([i for i in limits.eos_token_ids if i < limits.vocab_size], np.int64)

    # ------------------------------------------------------------------ arrival

    def admit(self, request: Request) -> bool:
        """True: it may be scheduled. False: its grammar is being compiled. Raises InvalidRequest if it cannot be."""
        structured = request.sampling.structured
        assert structured is not None
        if self._compiler is None:
            if self._make_compiler is None:
                raise InvalidRequest("structured output is not available in this engine", structured.param)
            self._compiler = self._make_compiler()
        future = self._compiler.submit(structured)
        if not future.done():
            self.compiling[request.request_id] = (request, future)
            return False
        fault = future.exception()
        if fault is not None:
            raise _refusal(request, fault)
        self.running[request.request_id] = _Structured(future.result())
        return True

    def arrivals(self, seconds: float = 0.0) -> Arrivals:
        """Requests whose compilation has ended; waits at most `seconds` for the first."""
        arrivals = Arrivals([], [])
        if not self.compiling:
            return arrivals
        if seconds:
            futures = [future for _, future in self.compiling.values()]
            wait(futures, timeout=seconds, return_when=FIRST_COMPLETED)
        for request, future in [pair for pair in self.compiling.values() if pair[1].done()]:
            del self.compiling[request.request_id]
            fault = future.exception()
            if fault is not None:
                arrivals.failed.append((request, _refusal(request, fault)))
            else:
                self.running[request.request_id] = _Structured(future.result())
                arrivals.ready.append(request)
        return arrivals

    def forget(self, request_id: str) -> None:
        """Drops a request that has ended, if it is here."""
        self.running.pop(request_id, None)
        self.compiling.pop(request_id, None)

    def close(self) -> None:
        self.compiling.clear()
        if self._compiler is not None:
            self._compiler.close()

    # ------------------------------------------------------------------ steps

    def completes(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Advances the sequence by its last token; why it ends, if its text is complete and cannot grow.

        LENGTH: the limit made it end there. Raises GrammarError if the grammar exceeds its bounds.
        """
        matcher = self._matcher(sequence)
        num_left = sequence.request.max_len - len(sequence.token_ids) + 1
        before = matcher.fork() if num_left <= HORIZON else None
        matcher.advance([token_id])
        if not matcher.is_terminated:
            return None
        is_cut = before is not None and self._token_to_end(sequence, before, num_left) is not None
        return FinishReason.LENGTH if is_cut else FinishReason.STOP

    def continued(self, beam: Sequence, token_id: int) -> Matcher:
        """The beam's state after this token; its own is unchanged. Raises GrammarError as `completes`."""
        matcher = self._matcher(beam).fork()
        matcher.advance([token_id])
        return matcher

    def branched(self, beams: list[Sequence], matchers: list[Matcher]) -> None:
        """Replaces a request's beams and their states."""
        running = self.running[beams[0].request.request_id]
        running.matchers = {beam.index: matcher for beam, matcher in zip(beams, matchers, strict=True)}

    def allowed(self, sequence: Sequence, drafted: TokenTree) -> TokenTree:
        """The part of a draft that the grammar allows."""
        matcher = self._matcher(sequence)
        if not drafted.parents:
            return drafted.first(matcher.accepted(drafted.token_ids))
        kept = [draft[: matcher.accepted(draft)] for draft in branches(drafted)]
        return merged(draft for draft in kept if draft)

    def mask(self, scheduled: ScheduledStep) -> tuple[TokenMask, list[tuple[Sequence, GrammarError]]]:
        """The mask of a step's samples, all earlier steps being committed; and sequences whose grammar failed.

        Sequences that have ended meanwhile have no mask: their tokens are discarded.
        """
        indices: list[int] = []
        failed: list[tuple[Sequence, GrammarError]] = []
        bits = np.zeros((len(scheduled.step.masked), self._num_words), np.uint32)
        # by sample: the drafted token before it, and its depth from 1
        walked: dict[int, tuple[int, int]] = {}
        for draft, first in scheduled.step.verified():
            depth = depths(draft.parents) or range(len(draft.token_ids))
            walked.update(
                {first + n: (token_id, 1 + depth[n - 1]) for n, token_id in enumerate(draft.token_ids, 1)}
            )
        at = 0  # drafted tokens that the matcher has taken
        for index in scheduled.step.masked:
            sequence = scheduled.receivers[index]
            if sequence.phase is Phase.FINISHED or any(sequence is other for other, _ in failed):
                continue
            row = bits[len(indices)]
            matcher = self._matcher(sequence)
            try:
                if index in walked:  # depth first: back to the parent, and on
                    token_id, depth_of = walked[index]
                    if at >= depth_of:
                        matcher.rollback(at - depth_of + 1)
                    matcher.advance([token_id])
                    at = depth_of
                matcher.fill(row)
                num_left = sequence.request.max_len - len(sequence.token_ids) - at
                ending = self._token_to_end(sequence, matcher, num_left)
                if ending is not None:
                    row[:] = 0
                    row[ending // 32] = 1 << ending % 32
                if index in walked and index + 1 not in walked:
                    matcher.rollback(at)
                    at = 0
            except GrammarError as error:
                failed.append((sequence, error))
                row[:], at = 0, 0
                continue
            if sequence.request.sampling.ignore_eos:
                self._ban_end(row)
            indices.append(index)
        return TokenMask(np.array(indices, np.int64), bits[: len(indices)]), failed

    def _token_to_end(self, sequence: Sequence, matcher: Matcher, num_left: int) -> int | None:
        """The token that the limit makes necessary for the text to end, if it is that near."""
        sampling = sequence.request.sampling
        closer = self.running[sequence.request.request_id].grammar.closer
        if closer is None or num_left > HORIZON or sequence.is_beam:
            return None
        if sampling.bad_words or sampling.allowed_token_ids:  # these may ban it
            return None
        return closer.token_to_end(matcher, num_left)

    def _matcher(self, sequence: Sequence) -> Matcher:
        """Made at the sequence's first sample. A preempted sequence keeps it: its text is unchanged."""
        running = self.running[sequence.request.request_id]
        matcher = running.matchers.get(sequence.index)
        if matcher is None:
            matcher = running.matchers[sequence.index] = running.grammar.matcher()
        return matcher

    def _ban_end(self, row: np.ndarray) -> None:
        """Bans end tokens, unless nothing else is allowed: the request ignores them."""
        without = row.copy()
        np.bitwise_and.at(
            without, self._end_ids // 32, ~(np.uint32(1) << (self._end_ids % 32).astype(np.uint32))
        )
        if without.any():
            row[:] = without


def _refusal(request: Request, fault: BaseException) -> QuireError:
    structured = request.sampling.structured
    assert structured is not None
    if isinstance(fault, GrammarError):
        return InvalidRequest(str(fault), structured.param)
    return fault if isinstance(fault, QuireError) else QuireError(f"{type(fault).__name__}: {fault}")
