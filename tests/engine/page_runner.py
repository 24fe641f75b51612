"""PageRunner: executes Steps on pages of plain integers, so that wrong sharing shows as a wrong token.

Its "model" reads every position of a row's context through the block table and hashes what it finds; the
expected answer is computed from the tokens alone. Any block that was reused, overwritten, copied late or
shared wrongly changes the hash.
"""

import zlib
from collections import deque
from collections.abc import Callable, Sequence

from quire.core.draft import ROOT, Draft
from quire.core.errors import DeviceMemoryFull
from quire.core.layout import LayerGroups
from quire.core.request import ints
from quire.core.step import (
    BeamCandidates,
    BeamSet,
    HostTransfers,
    PromptLogprobs,
    RowStart,
    Step,
    StepResult,
    TokenLogprobs,
)
from quire.speculate.tree import accepted_nodes

VOCABULARY = 50
END = 0


def next_token(token_ids: Sequence[int], sample_index: int) -> int:
    text = ",".join(map(str, token_ids)) + f"/{sample_index}"
    return zlib.crc32(text.encode()) % VOCABULARY


def expected(prompt: Sequence[int], sample_index: int, max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, sample_index))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


class PageRunner:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        token_scores: Callable[[Sequence[int]], list[float]] | None = None,
        groups: LayerGroups | None = None,
    ) -> None:
        """`token_scores`: log probabilities after a context, where beams are to be searched. `groups`: of layers, of
        which those with a window read the last positions only.
        """
        self.groups = groups or LayerGroups.together(1)
        self.token_scores = token_scores
        self.block_size = block_size
        self.pages = [[-1] * block_size for _ in range(num_blocks + 1)]
        self.rows: dict[int, RowStart] = {}
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.hosts: dict[int, list[int]] = {}  # pages in host memory
        self.launched: deque[tuple[Step, bool]] = deque()  # and whether its pass fits
        self.moved = 0  # steps whose moves are made
        self.largest_step = 0
        self.is_full = False  # the next launch fails

    def launch(self, step: Step) -> None:
        if self.is_full:
            self.is_full = False
            self.launched.append((step, False))
            raise DeviceMemoryFull("no room")
        self.launched.append((step, True))

    def collect(self) -> StepResult:
        step, fits = self.launched.popleft()
        while not fits:
            self.prepare(step)
            step, fits = self.launched.popleft()
        return self.run(step)

    def close(self) -> None:
        self.launched.clear()

    def prepare(self, step: Step) -> None:
        """All that comes before the forward pass."""
        for start in step.starts:
            self.rows[start.row] = start
            self.tokens[start.row] = list(start.token_ids)
            self.tables[start.row] = list(start.block_ids)
        told = zip(step.forced_rows, step.forced_positions, step.forced_tokens, strict=True)
        for row, position, token_id in told:
            self.tokens[row][position:] = [token_id]
        for draft in step.drafts:
            self.tokens[draft.row][draft.position :] = draft.token_ids
        for row, index, block in zip(step.table_rows, step.table_indices, step.table_blocks, strict=True):
            table = self.tables[row]
            table.extend([0] * (index + 1 - len(table)))
            table[index] = block
        if step.moves is not None:
            self.move(step.moves)
        assert len(set(step.copy_targets)) == len(step.copy_targets), "two copies into one block"
        for source, target in zip(step.copy_sources, step.copy_targets, strict=True):
            self.pages[target] = list(self.pages[source])

    def move(self, moves: HostTransfers) -> None:
        """As a side stream might: what leaves is read first, and what was not written yet is not there."""
        for block, host in zip(moves.out_blocks, moves.out_hosts, strict=True):
            self.hosts[host] = list(self.pages[block])
        for host, block in zip(moves.in_hosts, moves.in_blocks, strict=True):
            self.pages[block] = list(self.hosts[host])
        self.moved += 1

    def num_moved(self) -> int:
        return self.moved

    def run(self, step: Step) -> StepResult:
        self.prepare(step)
        self.largest_step = max(self.largest_step, sum(step.num_tokens))
        contexts = []
        for row, start, count in zip(step.rows, step.num_computed, step.num_tokens, strict=True):
            for position in range(start, start + count):
                self.write(row, position, self.tokens[row][position])
        for row, start, count in zip(step.rows, step.num_computed, step.num_tokens, strict=True):
            contexts.append([self.read(row, position, start) for position in range(start + count)])
        result = []
        offsets = step.sample_offsets or [0] * len(step.sample_rows)
        for source, row, offset in zip(step.sample_sources, step.sample_rows, offsets, strict=True):
            context = contexts[source][: len(contexts[source]) - offset]
            tree = next((draft for draft in step.drafts if draft.row == row and draft.parents), None)
            if tree is not None:
                context = _path(tree, context)
            token = next_token(context, self.rows[row].sample_index)
            self.tokens[row][len(context) : len(context) + 1] = [token]
            result.append(token)
        for draft, first in step.verified():
            if draft.parents:
                self.settle(draft, result[first : first + 1 + len(draft.token_ids)])
        beams = tuple(self.candidates(one, [contexts[i] for i in step.sample_sources]) for one in step.beams)
        return StepResult(step.step_id, ints(result), prompt_logprobs=self.scores(step), beams=beams)

    def scores(self, step: Step) -> tuple[PromptLogprobs, ...]:
        """One entry for each prompt token after the first, of rows that ask."""
        pieces = []
        for row, first, count in zip(step.rows, step.num_computed, step.num_tokens, strict=True):
            start = self.rows[row]
            last = min(first + count, start.num_prompt_tokens - 1)
            if start.sampling.prompt_logprobs is not None and last > first:
                tokens = start.token_ids[first + 1 : last + 1]
                entries = tuple(TokenLogprobs(token, -1.0, 1, (), ()) for token in tokens)
                pieces.append(PromptLogprobs(row, first + 1, entries))
        return tuple(pieces)

    def settle(self, tree: Draft, chosen: list[int]) -> None:
        """The accepted path's pages, read where they are, are written where they belong."""
        path = accepted_nodes(tree.token_ids, tree.parents, chosen)
        held = [self.read(tree.row, tree.position + node) for node in path]
        for position, token in enumerate(held, tree.position):
            self.write(tree.row, position, token)
        self.tokens[tree.row][tree.position :] = [chosen[0], *(chosen[1 + node] for node in path)]

    def candidates(self, beams: BeamSet, contexts: list[list[int]]) -> BeamCandidates:
        assert self.token_scores is not None
        found = [
            (score + more, index, token)
            for index, score in zip(beams.samples, beams.scores, strict=True)
            for token, more in enumerate(self.token_scores(contexts[index]))
        ]
        return best_of(found, beams)

    def page(self, row: int, position: int, group: int) -> list[int]:
        block = self.tables[row][position // self.block_size * self.groups.num_groups + group]
        assert block != 0, "a real position was mapped to block 0"
        return self.pages[block]

    def write(self, row: int, position: int, token: int) -> None:
        for group in range(self.groups.num_groups):
            self.page(row, position, group)[position % self.block_size] = token + 1000 * group

    def read(self, row: int, position: int, query: int = 0) -> int:
        """What a query finds at this position, by the pages of all groups that it sees."""
        groups = self.groups
        seen = range(groups.num_groups if position > query - groups.window else groups.num_full)
        found = {self.page(row, position, group)[position % self.block_size] - 1000 * group for group in seen}
        if not found:  # no layer sees it: for the answer, what the row knows
            return self.tokens[row][position]
        return found.pop() if len(found) == 1 else -1


def best_of(found: list[tuple[float, int, int]], beams: BeamSet) -> BeamCandidates:
    """What a sampler returns of all candidates (score, sample, token), which come best beam and lowest id first."""
    found = sorted(found, key=lambda one: -one[0])
    count, rest = beams.num_candidates, found[beams.num_candidates :]
    going_on = [one for one in rest if one[2] not in beams.stop_token_ids] if beams.stop_token_ids else []
    scores, samples, tokens = zip(*found[:count], *going_on[:count], strict=True)
    return BeamCandidates(ints(samples), ints(tokens), scores)


def _path(tree: Draft, context: list[int]) -> list[int]:
    """What the last token of `context` sees: all before the tree, and its ancestors in it."""
    node, path = len(context) - tree.position - 1, []
    while node != ROOT:
        path.append(context[tree.position + node])
        node = tree.parents[node]
    return context[: tree.position] + path[::-1]
