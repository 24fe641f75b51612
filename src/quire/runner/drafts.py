"""Drafts in a step: trees as arrays for kernels, and the distributions that drafted tokens were sampled from.

Proposals is one object of both runners: the draft model's samples tokens and leaves their distributions, the target's
accepts or rejects the tokens by them.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from quire.core.draft import ROOT, Draft, ancestors, depths
from quire.core.request import Ints, ints
from quire.core.step import Step
from quire.sampling import rejection
from quire.sampling.columns import Purpose
from quire.sampling.records import Sampled, SampleRequests, on_device
from quire.sampling.sampler import Sampler

NO_TREE = -1


@dataclass(frozen=True, slots=True)
class SpreadTrees:
    """The tokens of a step in which some rows have trees."""

    positions: np.ndarray  # [T] int64, in the sequence
    starts: np.ndarray  # [T] int32, where the row's tree begins; NO_TREE
    ancestors: np.ndarray  # [T] int64, bit n: the token sees node n


@lru_cache(maxsize=1024)  # drafts of one kind have one shape
def _arrays(parents: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Depths and ancestors of a tree's nodes, each [K] int64."""
    of_nodes = ints(np.frombuffer(parents, np.int32).tolist())
    return np.array(depths(of_nodes), np.int64), np.array(ancestors(of_nodes), np.int64)


def spread_trees(
    drafts: tuple[Draft, ...], rows: np.ndarray, first_places: np.ndarray, counts: np.ndarray
) -> SpreadTrees | None:
    """rows, first_places, counts [R]: as of StepInputs. None where every draft is a chain."""
    trees = {draft.row: draft for draft in drafts if draft.parents}
    if not trees:
        return None
    num_tokens = int(counts.sum())
    positions = np.empty(num_tokens, np.int64)
    starts = np.full(num_tokens, NO_TREE, np.int32)
    seen = np.zeros(num_tokens, np.int64)
    first = 0
    for row, computed, count in zip(rows.tolist(), first_places.tolist(), counts.tolist(), strict=True):
        places = np.arange(computed, computed + count)
        here = slice(first, first + count)
        positions[here] = places
        tree = trees.get(row)
        if tree is not None:
            nodes = places - tree.position
            inside = nodes >= 0
            depth, bits = _arrays(tree.parents.tobytes())
            positions[here][inside] = tree.position + depth[nodes[inside]]
            seen[here][inside] = bits[nodes[inside]]
            starts[here] = tree.position
        first += count
    return SpreadTrees(positions, starts, seen)


@dataclass(frozen=True, slots=True)
class VerifiedTrees:
    """The trees that a step verifies, as the kernel that accepts paths takes them."""

    trees: np.ndarray  # [D, 4] int32: row, position of the first node, index into [S], number of nodes
    nodes: np.ndarray  # [D, 2, N] int32: tokens and parents


def verified_trees(step: Step) -> VerifiedTrees | None:
    """None where there is none: a chain needs no move, nor do its tokens unless the draft model sampled them."""
    verified = [
        (draft, first)
        for draft, first in step.verified()
        if (draft.parents or draft.drawn) and not draft.is_growing
    ]
    if not verified:
        return None
    most = max(len(draft.token_ids) for draft, _ in verified)
    trees, nodes = np.empty((len(verified), 4), np.int32), np.full((len(verified), 2, most), -2, np.int32)
    for i, (draft, first) in enumerate(verified):
        count = len(draft.token_ids)
        trees[i] = draft.row, draft.position, first, count
        nodes[i, 0, :count] = draft.token_ids
        nodes[i, 1, :count] = draft.parents or range(-1, count - 1)
    return VerifiedTrees(trees, nodes)


def judged_drafts(step: Step) -> list[tuple[Draft, int]]:
    """Drafts that are judged by their probabilities, and the index into [S] of the first of their samples."""
    if not any(draft.drawn for draft in step.drafts):
        return []
    return [(draft, first) for draft, first in step.verified() if draft.drawn and not draft.is_growing]


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
        random = _uniforms(requests, indices, Purpose.DRAFT)[:, : max(step.drawn)]
        tokens = rejection.draw_distinct(distributions, on_device(random, logits.device)).tolist()
        growing = {draft.row for draft in step.drafts}
        rows = requests.rows[indices]
        for row in dict.fromkeys(rows.tolist()):
            level = distributions[on_device(np.flatnonzero(rows == row), logits.device)]
            if row in growing:
                self._of_row[row].append(level)
            else:
                self._of_row[row] = [level]
        drawn = [ints() for _ in step.drawn]
        for index, token_ids in zip(indices.tolist(), tokens, strict=True):
            drawn[index] = ints(token for token in token_ids[: step.drawn[index]] if token >= 0)
        return tuple(drawn)

    def judge(
        self,
        sampler: Sampler,
        logits: Tensor,
        requests: SampleRequests,
        drafts: list[tuple[Draft, int]],
    ) -> tuple[np.ndarray, Tensor]:
        """(samples, the tokens that they become), of nodes with children in drafts judged by probabilities.

        To be called before sampling.
        """
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
        proposed_ids = np.array([tokens + [-1] * (width - len(tokens)) for tokens in children], np.int64)
        chosen = rejection.accept(
            sampler.distributions(logits, requests, indices),
            torch.stack(proposed),
            on_device(proposed_ids, logits.device),
            on_device(_uniforms(requests, indices, Purpose.ACCEPT)[:, :width], logits.device),
            on_device(_uniforms(requests, indices, Purpose.RESAMPLE)[:, 0].copy(), logits.device),
        )
        return indices, chosen


def choose_tokens(
    proposals: Proposals, sampler: Sampler, logits: Tensor, requests: SampleRequests, step: Step
) -> tuple[Sampled, tuple[Ints, ...]]:
    """What a step samples, drafts accepted or rejected, and the tokens of a draft model. Uses `logits` up."""
    drawn = proposals.draw(sampler, logits, requests, step) if step.drawn else ()
    drafts = judged_drafts(step)
    verdict = proposals.judge(sampler, logits, requests, drafts) if drafts else None
    sampled = sampler(logits, requests)
    if verdict is not None:
        indices, chosen = verdict
        token_ids = sampled.token_ids.clone()
        token_ids[on_device(indices, token_ids.device)] = chosen
        sampled = replace(sampled, token_ids=token_ids)
    return sampled, drawn


def _uniforms(requests: SampleRequests, indices: np.ndarray, purpose: Purpose) -> np.ndarray:
    rows, columns = requests.rows[indices], requests.columns
    uniforms = rejection.numbers(
        columns.seed[rows], columns.sample_index[rows], requests.positions[indices], purpose
    )
    return np.ascontiguousarray(uniforms)
