"""Commit: turns a step's result into tokens, finished sequences and updates."""

from quire.core.request import FinishReason, Phase, Request, Sequence
from quire.core.step import SequenceUpdate, StepResult, TokenLogprobs
from quire.engine.beams import BeamSearches
from quire.engine.speculation import Speculation
from quire.engine.structured import StructuredOutputs
from quire.grammar.matcher import GrammarError
from quire.scheduler.plan import ScheduledStep
from quire.scheduler.scheduler import Scheduler
from quire.speculate.tree import accepted_nodes


class Committer:
    """Appends tokens, ends sequences, caches full blocks. Results of sequences that have ended are discarded."""

    def __init__(
        self, scheduler: Scheduler, structured: StructuredOutputs, speculation: Speculation | None = None
    ) -> None:
        self._scheduler = scheduler
        self._speculation = speculation
        self._structured = structured
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self._beams = BeamSearches(scheduler, structured)

    def commit(self, scheduled: ScheduledStep, result: StepResult) -> list[SequenceUpdate]:
        if result.prompt_logprobs:
            self._collect_prompt_logprobs(scheduled, result)
        failed = set(result.failed)
        # blocks behind NaN logits must not be cached
        self._scheduler.committed(scheduled, is_valid=not failed)
        updates: list[SequenceUpdate] = []
        drafted, charge = bool(scheduled.step.drafts), self._scheduler.charge
        rejected = self._verify(scheduled, result) if drafted else ()
        for i, sequence in enumerate(scheduled.receivers):
            if sequence.phase is Phase.FINISHED:
                continue  # overran by one token after its end
            if i in rejected:
                continue  # follows a rejected draft token
            if i in failed:
                updates += self.fail(sequence, _why_failed(sequence))
                continue
            if charge is not None:
                charge(sequence)
            if sequence.is_beam:
                continue  # beams have no token of their own until all of them are compared
            if drafted and not failed:  # it may end with the next token
                self._scheduler.memory.cache_full_blocks(sequence, len(sequence.token_ids))
            logprobs = result.logprobs[i] if result.logprobs else None
            try:
                updates.append(self._append(sequence, result.token_ids[i], logprobs))
            except GrammarError as error:
                updates += self.fail(sequence, str(error))
        if scheduled.step.beams:
            updates += self._beams.commit(scheduled, result, self._prompt_logprobs, self.fail)
        if self._speculation is not None:
            self._speculation.committed(scheduled, result.seconds)
        return _joined(updates) if drafted else updates

    def forget(self, request_id: str) -> None:
        self._prompt_logprobs.pop(request_id, None)
        if self._beams.searches:
            self._beams.forget(request_id)

    def _verify(self, scheduled: ScheduledStep, result: StepResult) -> set[int]:
        """Samples behind rejected draft tokens. Rewinds sequences with a draft to the accepted tokens."""
        rejected: set[int] = set()
        for draft, first in scheduled.step.verified():
            sequence = scheduled.receivers[first]
            last = first + len(draft.token_ids)
            accepted = accepted_nodes(draft.token_ids, draft.parents, result.token_ids[first : last + 1])
            rejected.update(range(first + 1, last + 1))
            rejected.difference_update(first + 1 + node for node in accepted)
            self._scheduler.rewind(sequence, draft.position + len(accepted))
            if self._speculation is not None and sequence.phase is not Phase.FINISHED:
                self._speculation.verified(sequence, draft, accepted)
        return rejected

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> SequenceUpdate:
        sequence.token_ids.append(token_id)
        request = sequence.request
        stops = token_id in request.stop_token_ids
        completed = None  # only an end token could follow
        if not stops and request.sampling.structured is not None:
            completed = self._structured.completes(sequence, token_id)
        if completed is not None:
            self._scheduler.finish(sequence, completed)
        elif stops or len(sequence.token_ids) >= request.max_len:
            self._end(sequence, token_id)
        prompt_logprobs = None
        if request.sampling.prompt_logprobs is not None and sequence.num_outputs == 1:
            prompt_logprobs = tuple(self._prompt_logprobs.get(request.request_id, ()))
        return SequenceUpdate(
            request.request_id,
            sequence.index,
            (token_id,),
            (logprobs,) if logprobs is not None else (),
            prompt_logprobs,
            sequence.finish_reason,
            sequence.stop_reason,
            sequence.num_cached,
        )

    def _end(self, sequence: Sequence, token_id: int) -> None:
        """A stop token ends a sequence of at least min_tokens; the length ends any."""
        request = sequence.request
        if token_id in request.stop_token_ids and sequence.num_outputs > request.sampling.min_tokens:
            named = token_id in request.sampling.stop_token_ids
            self._scheduler.finish(sequence, FinishReason.STOP, token_id if named else None)
        elif len(sequence.token_ids) >= request.max_len:
            self._scheduler.finish(sequence, FinishReason.LENGTH)

    def fail(self, sequence: Sequence, message: str) -> list[SequenceUpdate]:
        """Ends the request of a sequence that failed; other requests go on."""
        request_id = sequence.request.request_id
        message = f"request {request_id}: {message}"
        ended = self._scheduler.abort(request_id, FinishReason.ERROR)
        self.forget(request_id)
        return error_updates(ended, message)

    def _collect_prompt_logprobs(self, scheduled: ScheduledStep, result: StepResult) -> None:
        for piece in result.prompt_logprobs:
            sequence = scheduled.sequences[list(scheduled.step.rows).index(piece.row)]
            if sequence.phase is Phase.FINISHED:
                continue
            collected = self._prompt_logprobs.setdefault(sequence.request.request_id, [])
            missing = len(collected) + 1 - piece.first_position  # a resumed prompt computes some again
            collected.extend(piece.entries[max(0, missing) :])


def error_updates(ended: list[Sequence], message: str) -> list[SequenceUpdate]:
    """One update per failed sequence; of a beam search, one per answer that was asked for."""
    updates = [
        SequenceUpdate(s.request.request_id, s.index, (), finish_reason=FinishReason.ERROR, error=message)
        for s in ended
        if not s.is_beam
    ]
    for request in {s.request.request_id: s.request for s in ended if s.is_beam}.values():
        updates += request_errors(request, message)
    return updates


def request_errors(request: Request, message: str, param: str | None = None) -> list[SequenceUpdate]:
    """One update per answer of a request that failed as a whole."""
    return [
        SequenceUpdate(
            request.request_id, i, (), finish_reason=FinishReason.ERROR, error=message, param=param
        )
        for i in range(request.sampling.num_answers)
    ]


def _joined(updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
    """Joins the updates of each sequence: an accepted draft's tokens came one by one."""
    joined: list[SequenceUpdate] = []
    for update in updates:
        last = joined[-1] if joined else None
        if last is None or update.error or (last.request_id, last.index) != (update.request_id, update.index):
            joined.append(update)
            continue
        last.token_ids += update.token_ids
        last.logprobs += update.logprobs
        last.finish_reason, last.stop_reason = update.finish_reason, update.stop_reason
    return joined


def _why_failed(sequence: Sequence) -> str:
    """Why the sampler had no token to choose from."""
    position, sampling = len(sequence.token_ids), sequence.request.sampling
    if sampling.structured is not None and (
        sampling.allowed_token_ids or sampling.bad_words or sampling.logit_bias
    ):
        return (
            f"at position {position} none of the tokens that the {sampling.structured.kind} allows is left by "
            "allowed_token_ids, bad_words and logit_bias: loosen one of them"
        )
    return f"the model gave logits that are not finite at position {position}: check the weights, or try dtype=float32"
