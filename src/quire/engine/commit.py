"""Commit: a step's results become tokens, ends and updates."""

from quire.core.request import FinishReason, Phase, Sequence
from quire.core.step import SequenceUpdate, StepResult, TokenLogprobs
from quire.engine.beams import BeamSearches
from quire.engine.speculation import Speculation
from quire.engine.structured import StructuredOutputs
from quire.grammar.errors import GrammarError
from quire.scheduler.planned import ScheduledStep
from quire.scheduler.scheduler import Scheduler
from quire.speculate.acceptance import accepted_nodes


class Committer:
    """Appends tokens, ends sequences, indexes full blocks. Results for ended sequences are discarded."""

    def __init__(
        self, scheduler: Scheduler, structured: StructuredOutputs, speculation: Speculation | None = None
    ) -> None:
        self._scheduler = scheduler
        self._speculation = speculation
        self._structured = structured
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self._beams = BeamSearches(scheduler, structured, self.fail)

    def commit(self, planned: ScheduledStep, result: StepResult) -> list[SequenceUpdate]:
        self._collect_prompt_logprobs(planned, result)
        failed = set(result.failed)
        if not failed:  # pages behind logits that are not numbers are not worth finding again
            self._seal(planned)
        updates: list[SequenceUpdate] = []
        drafted = bool(planned.step.drafts)
        refused = self._verify(planned, result) if drafted else ()
        for i, sequence in enumerate(planned.receivers):
            if sequence.phase is Phase.FINISHED:
                continue  # overran by one token after its end
            if sequence.is_beam:
                if i in failed:
                    updates += self.fail(sequence, _why_failed(sequence))
                continue  # beams have no token of their own until all of them are compared
            sequence.num_pending -= 1
            if i in refused:
                continue  # follows a drafted token that the target did not choose
            if i in failed:
                updates += self.fail(sequence, _why_failed(sequence))
                continue
            if drafted and not failed:  # it may end with the next token
                self._scheduler.memory.seal(sequence, len(sequence.token_ids))
            logprobs = result.logprobs[i] if result.logprobs else None
            try:
                updates.append(self._append(sequence, result.token_ids[i], logprobs))
            except GrammarError as error:
                updates += self.fail(sequence, str(error))
        if planned.step.beams:
            updates += self._beams.commit(planned, result, self._prompt_logprobs)
        if self._speculation is not None:
            self._speculation.committed(planned, result.seconds)
        return _joined(updates) if drafted else updates

    def forget(self, request_id: str) -> None:
        self._prompt_logprobs.pop(request_id, None)
        self._beams.forget(request_id)

    def _verify(self, planned: ScheduledStep, result: StepResult) -> set[int]:
        """Samples whose position was never reached. Sequences with a draft go back to what they will have computed."""
        refused: set[int] = set()
        for draft, first in planned.step.verified():
            sequence = planned.receivers[first]
            last = first + len(draft.token_ids)
            accepted = accepted_nodes(draft.token_ids, draft.parents, result.token_ids[first : last + 1])
            refused.update(range(first + 1, last + 1))
            refused.difference_update(first + 1 + node for node in accepted)
            if sequence.phase is Phase.RUNNING:
                sequence.num_computed = draft.position + len(accepted)
            if self._speculation is not None and sequence.phase is not Phase.FINISHED:
                self._speculation.verified(sequence, draft, accepted)
        return refused

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> SequenceUpdate:
        sequence.token_ids.append(token_id)
        request = sequence.request
        stops = token_id in request.stop_token_ids
        if (
            not stops
            and request.sampling.structured is not None
            and self._structured.completes(sequence, token_id)
        ):
            self._scheduler.finish(sequence, FinishReason.STOP)  # an end token could say no more
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
        """A stop token counts once min_tokens are there; the length counts always."""
        request = sequence.request
        if token_id in request.stop_token_ids and sequence.num_outputs > request.sampling.min_tokens:
            named = token_id in request.sampling.stop_token_ids
            self._scheduler.finish(sequence, FinishReason.STOP, token_id if named else None)
        elif len(sequence.token_ids) >= request.max_len:
            self._scheduler.finish(sequence, FinishReason.LENGTH)

    def fail(self, sequence: Sequence, message: str) -> list[SequenceUpdate]:
        """What goes wrong with a sequence ends its request, not its neighbours."""
        request_id = sequence.request.request_id
        message = f"request {request_id}: {message}"
        ended = self._scheduler.abort(request_id, FinishReason.ERROR)
        self.forget(request_id)
        return error_updates(ended, message)

    def _seal(self, planned: ScheduledStep) -> None:
        step, memory = planned.step, self._scheduler.memory
        block_size = memory.block_size
        for sequence, start, count in zip(planned.sequences, step.num_computed, step.num_tokens, strict=True):
            computed = start + count
            if computed // block_size > sequence.num_indexed and sequence.phase is Phase.RUNNING:
                memory.seal(sequence, computed)

    def _collect_prompt_logprobs(self, planned: ScheduledStep, result: StepResult) -> None:
        for piece in result.prompt_logprobs:
            sequence = planned.sequences[list(planned.step.rows).index(piece.row)]
            if sequence.phase is Phase.FINISHED:
                continue
            collected = self._prompt_logprobs.setdefault(sequence.request.request_id, [])
            missing = len(collected) + 1 - piece.first_position  # a resumed prompt computes some again
            collected.extend(piece.entries[max(0, missing) :])


def error_updates(ended: list[Sequence], message: str) -> list[SequenceUpdate]:
    """What the caller hears of sequences that ended so: of beams it knows only how many it will get."""
    updates = [
        SequenceUpdate(s.request.request_id, s.index, (), finish_reason=FinishReason.ERROR, error=message)
        for s in ended
        if not s.is_beam
    ]
    for request in {s.request.request_id: s.request for s in ended if s.is_beam}.values():
        updates += [
            SequenceUpdate(request.request_id, i, (), finish_reason=FinishReason.ERROR, error=message)
            for i in range(request.sampling.num_answers)
        ]
    return updates


def _joined(updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
    """One update per sequence: an accepted draft's tokens came one by one."""
    found: list[SequenceUpdate] = []
    for update in updates:
        last = found[-1] if found else None
        if last is None or update.error or (last.request_id, last.index) != (update.request_id, update.index):
            found.append(update)
            continue
        last.token_ids += update.token_ids
        last.logprobs += update.logprobs
        last.finish_reason, last.stop_reason = update.finish_reason, update.stop_reason
    return found


def _why_failed(sequence: Sequence) -> str:
    """The sampler found no token that it could take."""
    position, sampling = len(sequence.token_ids), sequence.request.sampling
    if sampling.structured is not None and (
        sampling.allowed_token_ids or sampling.bad_words or sampling.logit_bias
    ):
        return (
            f"at position {position} none of the tokens that the {sampling.structured.kind} allows is left by "
            "allowed_token_ids, bad_words and logit_bias: loosen one of them"
        )
    return f"the model gave logits that are not finite at position {position}: check the weights, or try dtype=float32"
