"""Proposals: a draft model's distributions, kept on the device from the draft to its verification.

Both runners hold the same object: the draft model's draws tokens and leaves what it drew them from, the target's judges
the tokens by it.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.core.draft import ROOT, Draft
from quire.core.ints import Ints, ints
from quire.core.step import Step
from quire.runner.trees import drawn_drafts
from quire.sampling import rejection
from quire.sampling.random import Purpose
from quire.sampling.records import Sampled, SampleRequests, on_device
from quire.sampling.sampler import Sampler


class Proposals:
    """By row: the distribution after its last token [1, V], then those after each level of its tree [branches, V]."""

    def __init__(self) -> None:
        self._of_row: dict[int, list[Tensor]] = {}

    def draw(
        self, sampler: Sampler, logits: Tensor, requests: SampleRequests, step: Step
    ) -> tuple[Ints, ...]:
        """As many different tokens as each sample asks for (`Step.drawn`). Waits for the device."""
        indices = np.flatnonzero(np.asarray(step.drawn))
        distributions = sampler.distributions(logits, requests, indices)
        random = _numbers(requests, indices, Purpose.DRAFT)[:, : max(step.drawn)]
        tokens = rejection.draw_distinct(distributions, on_device(random, logits.device)).tolist()
        growing = {draft.row for draft in step.drafts}
        rows = requests.rows[indices]
        for row in dict.fromkeys(rows.tolist()):
            found = distributions[on_device(np.flatnonzero(rows == row), logits.device)]
            if row in growing:
                self._of_row[row].append(found)
            else:
                self._of_row[row] = [found]
        drawn = [ints() for _ in step.drawn]
        for index, line in zip(indices.tolist(), tokens, strict=True):
            drawn[index] = ints(token for token in line[: step.drawn[index]] if token >= 0)
        return tuple(drawn)

    def judge(
        self,
        sampler: Sampler,
        logits: Tensor,
        requests: SampleRequests,
        drafts: list[tuple[Draft, int]],
    ) -> tuple[np.ndarray, Tensor]:
        """(samples, the tokens that they become): of drawn drafts' nodes that have children. Before sampling."""
        samples: list[int] = []
        children: list[list[int]] = []
        proposed: list[Tensor] = []
        for draft, first in drafts:
            levels = self._of_row[draft.row]
            parents = draft.parents or range(-1, len(draft.token_ids) - 1)
            of_node: dict[int, list[int]] = {}
            for parent, token_id in zip(parents, draft.token_ids, strict=True):
                of_node.setdefault(parent, []).append(token_id)
            for node, tokens in of_node.items():
                branch, depth = divmod(node, draft.drawn) if node != ROOT else (0, -1)
                samples.append(first + 1 + node)
                children.append(tokens)
                proposed.append(levels[1 + depth][branch])
        indices = np.array(samples, np.int64)
        width = max(map(len, children))
        lines = np.array([tokens + [-1] * (width - len(tokens)) for tokens in children], np.int64)
        chosen = rejection.accept(
            sampler.distributions(logits, requests, indices),
            torch.stack(proposed),
            on_device(lines, logits.device),
            on_device(_numbers(requests, indices, Purpose.ACCEPT)[:, :width], logits.device),
            on_device(_numbers(requests, indices, Purpose.RESAMPLE)[:, 0].copy(), logits.device),
        )
        return indices, chosen


def choose_tokens(
    proposals: Proposals | None, sampler: Sampler, logits: Tensor, requests: SampleRequests, step: Step
) -> tuple[Sampled, tuple[Ints, ...]]:
    """What a step samples, drawn drafts judged, and what it draws for a draft. Uses `logits` up."""
    if proposals is None or not (step.drawn or step.drafts):
        return sampler(logits, requests), ()
    drawn = proposals.draw(sampler, logits, requests, step) if step.drawn else ()
    drafts = drawn_drafts(step)
    verdict = proposals.judge(sampler, logits, requests, drafts) if drafts else None
    sampled = sampler(logits, requests)
    if verdict is not None:
        indices, chosen = verdict
        token_ids = sampled.token_ids.clone()
        token_ids[on_device(indices, token_ids.device)] = chosen
        sampled = replace(sampled, token_ids=token_ids)
    return sampled, drawn


def _numbers(requests: SampleRequests, indices: np.ndarray, purpose: Purpose) -> np.ndarray:
    rows, columns = requests.rows[indices], requests.columns
    found = rejection.numbers(
        columns.seed[rows], columns.sample_index[rows], requests.positions[indices], purpose
    )
    return np.ascontiguousarray(found)
