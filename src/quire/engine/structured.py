"""Structured output in the engine: requests wait here for their grammar, sequences advance in it, steps get masks."""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

import numpy as np

from quire.core.draft import TokenTree, depths
from quire.core.errors import InvalidRequest, QuireError
from quire.core.request import Phase, Request, Sequence
from quire.engine.validation import Limits
from quire.grammar.compiler import Compiler, Grammar
from quire.grammar.errors import GrammarError
from quire.grammar.matcher import Matcher
from quire.sampling.records import TokenMask
from quire.scheduler.plan import ScheduledStep
from quire.speculate.tree import branches, merged


@dataclass(slots=True)
class _Structured:
    """A request whose grammar is known, and its sequences' places in it."""

    grammar: Grammar
    matchers: dict[int, Matcher] = field(default_factory=dict)  # by sequence index


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests that compiling has let go."""

    ready: list[Request]
    failed: list[tuple[Request, QuireError]]


class StructuredOutputs:
    """One thread calls this, the engine's. A grammar that is known costs an arrival nothing."""

    def __init__(self, make_compiler: Callable[[], Compiler] | None, limits: Limits) -> None:
        self._make_compiler = make_compiler
        self._compiler: Compiler | None = None
        self._compiling: dict[str, tuple[Request, Future[Grammar]]] = {}
        self._running: dict[str, _Structured] = {}
        self._num_words = -(-limits.vocab_size // 32)
        self._end_ids = np.array([i for i in limits.eos_token_ids if i < limits.vocab_size], np.int64)

    # ------------------------------------------------------------------ arrival

    def admit(self, request: Request) -> bool:
        """True: it may be scheduled. False: it waits here. Raises InvalidRequest if it is known to be wrong."""
        structured = request.sampling.structured
        assert structured is not None
        if self._compiler is None:
            if self._make_compiler is None:
                raise InvalidRequest("structured output is not available in this engine", structured.param)
            self._compiler = self._make_compiler()
        future = self._compiler.submit(structured)
        if not future.done():
            self._compiling[request.request_id] = (request, future)
            return False
        fault = future.exception()
        if fault is not None:
            raise _refusal(request, fault)
        self._running[request.request_id] = _Structured(future.result())
        return True

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    def has_request(self, request_id: str) -> bool:
        return request_id in self._compiling

    def arrivals(self, seconds: float = 0.0) -> Arrivals:
        """Those whose grammar is done by now; waits so long for the first of them."""
        found = Arrivals([], [])
        if not self._compiling:
            return found
        if seconds:
            futures = [future for _, future in self._compiling.values()]
            wait(futures, timeout=seconds, return_when=FIRST_COMPLETED)
        for request, future in [pair for pair in self._compiling.values() if pair[1].done()]:
            del self._compiling[request.request_id]
            fault = future.exception()
            if fault is not None:
                found.failed.append((request, _refusal(request, fault)))
            else:
                self._running[request.request_id] = _Structured(future.result())
                found.ready.append(request)
        return found

    def forget(self, request_id: str) -> bool:
        """The request has ended; whether it was still waiting here."""
        self._running.pop(request_id, None)
        return self._compiling.pop(request_id, None) is not None

    def close(self) -> None:
        self._compiling.clear()
        if self._compiler is not None:
            self._compiler.close()

    # ------------------------------------------------------------------ steps

    def completes(self, sequence: Sequence, token_id: int) -> bool:
        """The sequence goes on with this token: whether its text is whole then and cannot grow.

        Raises GrammarError if the grammar takes more than its bounds from here.
        """
        matcher = self._matcher(sequence)
        matcher.advance([token_id])
        return matcher.is_terminated

    def continued(self, beam: Sequence, token_id: int) -> Matcher:
        """Where the beam would stand with this token; it stays where it is. Raises GrammarError as `completes`."""
        matcher = self._matcher(beam).fork()
        matcher.advance([token_id])
        return matcher

    def branched(self, beams: list[Sequence], places: list[Matcher]) -> None:
        """These are a request's beams from now on, and where each stands; the places of all others are given up."""
        running = self._running[beams[0].request.request_id]
        running.matchers = {beam.index: place for beam, place in zip(beams, places, strict=True)}

    def allowed(self, sequence: Sequence, drafted: TokenTree) -> TokenTree:
        """What the grammar lets through of a draft."""
        matcher = self._matcher(sequence)
        if not drafted.parents:
            return drafted.first(matcher.accepted(drafted.token_ids))
        kept = [draft[: matcher.accepted(draft)] for draft in branches(drafted)]
        return merged(draft for draft in kept if draft)

    def mask(self, planned: ScheduledStep) -> tuple[TokenMask, list[tuple[Sequence, GrammarError]]]:
        """What the masked samples of a step may be, all earlier steps being committed; and whom that fails.

        Those that ended meanwhile have no mask: their tokens are discarded.
        """
        indices: list[int] = []
        failed: list[tuple[Sequence, GrammarError]] = []
        bits = np.zeros((len(planned.step.masked), self._num_words), np.uint32)
        walked: dict[
            int, tuple[int, int]
        ] = {}  # by sample: the drafted token before it, and its depth from 1
        for draft, first in planned.step.verified():
            depth = depths(draft.parents) or range(len(draft.token_ids))
            walked.update(
                {first + n: (token_id, 1 + depth[n - 1]) for n, token_id in enumerate(draft.token_ids, 1)}
            )
        at = 0  # how many drafted tokens the matcher has taken
        for index in planned.step.masked:
            sequence = planned.receivers[index]
            if sequence.phase is Phase.FINISHED or any(sequence is one for one, _ in failed):
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

    def _matcher(self, sequence: Sequence) -> Matcher:
        """Made at the sequence's first sample. A preempted sequence keeps it: its text is still the same."""
        running = self._running[sequence.request.request_id]
        matcher = running.matchers.get(sequence.index)
        if matcher is None:
            matcher = running.matchers[sequence.index] = running.grammar.matcher()
        return matcher

    def _ban_end(self, row: np.ndarray) -> None:
        """Who ignores end tokens gets none, except where nothing else is left."""
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
