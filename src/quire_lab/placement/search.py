"""Groups of GPUs, the shape of each and its models: AlpaServe's algorithms 1 and 2.

Algorithm 2 enumerates how GPUs are divided into groups and what shape these have, for all models together and for
buckets of models with similar latency, which get GPUs of their own. Algorithm 1 fills the groups: it adds the replica
that raises the simulated attainment most, with a beam; where that needs too many simulations, the model with the most
unserved requests goes to the group with the least work.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product

from quire_lab.placement.simulate import Group, Outcome, ParallelShape, Table, Trace, simulate

BEAM = 3
MAX_SIMULATED = 4_000_000  # requests of all simulations of the beam search; about ten seconds
SMALL = 4  # GPUs of a kind of which every division is tried
BUCKET = 0.38  # models of a bucket differ in latency by less than this share of the longest
SPREAD = 2  # GPUs around a bucket's share of the work that are tried


@dataclass(frozen=True)
class Case:
    """What is to be placed. Models are numbers: indices of `deadlines`, and of the rows of `table`."""

    gpus: Mapping[str, int]  # how many of each kind
    memory: Mapping[str, int]  # bytes of one that engines may use
    shapes: Mapping[str, Sequence[ParallelShape]]  # of groups, by kind
    table: Table
    deadlines: Sequence[float]
    trace: Trace
    gpus_per_node: int = 8
    models: tuple[int, ...] = ()  # that are placed; empty: all

    @property
    def placed(self) -> tuple[int, ...]:
        return self.models or tuple(range(len(self.deadlines)))

    def simulated(self, groups: Sequence[Group]) -> Outcome:
        return simulate(self.trace, groups, self.table, self.deadlines)

    def takes(self, group: Group, model: int) -> bool:
        """Whether the group has room for one more model."""
        row = self.table[group.gpu, group.shape]
        if model in group.models or row[model] is None:
            return False
        used = sum(served.num_bytes for held in (*group.models, model) if (served := row[held]) is not None)
        return used <= self.memory[group.gpu]


@dataclass(frozen=True, slots=True)
class Filled:
    groups: tuple[Group, ...]
    outcome: Outcome


def shapes_of(count: int, max_tp: int, max_pp: int) -> list[ParallelShape]:
    """Powers of two, as many GPUs as `count` at most."""
    powers = [1 << power for power in range(count.bit_length())]
    return [
        ParallelShape(tp, pp)
        for pp, tp in product(powers, powers)
        if tp <= max_tp and pp <= max_pp and tp * pp <= count
    ]


# ---------------------------------------------------------------------- algorithm 2: groups and shapes


def search(case: Case) -> Filled:
    """The best of all models together and of buckets."""
    candidates = list(divisions(case))
    costs = sum(_beam_cost(case, groups) for groups in candidates)
    fill = beam_fill if costs <= MAX_SIMULATED else fast_fill
    best = max((fill(case, groups) for groups in candidates), key=lambda filled: filled.outcome.score)
    buckets = _buckets(case)
    if fill is fast_fill and len(buckets) > 1 and len(case.gpus) == 1:
        split = _split(case, buckets)
        if split is not None and split.outcome.score > best.outcome.score:
            best = split
    return best


def divisions(case: Case) -> Iterator[tuple[Group, ...]]:
    """Of the GPUs of each kind into empty groups."""
    kinds = [
        [tuple(Group(gpu, shape) for shape in shapes) for shapes in _divided(count, case.shapes[gpu])]
        for gpu, count in case.gpus.items()
    ]
    for parts in product(*kinds):
        groups = tuple(group for part in parts for group in part)
        if nodes_of(groups, case.gpus, case.gpus_per_node) is not None:
            yield groups


def _divided(count: int, shapes: Sequence[ParallelShape]) -> list[tuple[ParallelShape, ...]]:
    """All divisions of few GPUs; of more, groups of one shape, and the rest in smaller ones with the same ranks."""
    if count <= SMALL:
        return [
            many
            for number in range(1, count + 1)
            for many in combinations_with_replacement(shapes, number)
            if sum(shape.size for shape in many) == count
        ]
    return [tuple(_filled(count, shape, shapes)) for shape in shapes if shape.size <= count]


def _filled(count: int, shape: ParallelShape, shapes: Sequence[ParallelShape]) -> Iterator[ParallelShape]:
    while count:
        for _ in range(count // shape.size):
            yield shape
        count %= shape.size
        smaller = [other for other in shapes if other.size <= count and other.tp <= shape.tp]
        shape = max(smaller, key=lambda other: (other.size, other.pp), default=ParallelShape(1, 1))


def nodes_of(
    groups: Sequence[Group], gpus: Mapping[str, int], per_node: int
) -> list[tuple[int, tuple[int, ...]]] | None:
    """The node of each group and its GPUs there, from 0; None where a group would lie on two nodes."""
    kinds = [
        (gpu, min(per_node, count - at)) for gpu, count in gpus.items() for at in range(0, count, per_node)
    ]
    free = [list(range(count)) for _, count in kinds]
    nodes: dict[int, tuple[int, tuple[int, ...]]] = {}
    for index in sorted(range(len(groups)), key=lambda index: -groups[index].shape.size):
        gpu, shape, _ = groups[index]
        possible = (n for n, (kind, _) in enumerate(kinds) if kind == gpu and len(free[n]) >= shape.size)
        node = next(possible, None)
        if node is None:
            return None
        nodes[index] = node, tuple(free[node][: shape.size])
        del free[node][: shape.size]
    return [nodes[index] for index in range(len(groups))]


def _buckets(case: Case) -> list[tuple[int, ...]]:
    """Models of similar latency on the smallest shape that holds them, from short to long."""
    buckets: list[list[int]] = []
    for model in sorted(case.placed, key=lambda model: _alone(case, model)):
        if not buckets or _alone(case, buckets[-1][0]) < (1 - BUCKET) * _alone(case, model):
            buckets.append([])
        buckets[-1].append(model)
    return [tuple(sorted(bucket)) for bucket in buckets]


def _alone(case: Case, model: int) -> float:
    return next(served.lone for row in case.table.values() if (served := row[model]) is not None)


def _split(case: Case, buckets: Sequence[tuple[int, ...]]) -> Filled | None:
    """GPUs for each bucket of its own. Buckets do not share GPUs, so each is placed alone and the best sum is taken."""
    ((gpu, count),) = case.gpus.items()
    work = [sum(_alone(case, model) for _, model in case.trace if model in bucket) for bucket in buckets]
    reached: dict[int, tuple[int, tuple[Group, ...]]] = {0: (0, ())}  # by GPUs used
    for bucket, share in zip(buckets, work, strict=True):
        wanted = round(share / sum(work) * count)
        part = replace(case, models=bucket, trace=[request for request in case.trace if request[1] in bucket])
        further: dict[int, tuple[int, tuple[Group, ...]]] = {}
        for number in range(max(1, wanted - SPREAD), min(count, wanted + SPREAD) + 1):
            alone = replace(part, gpus={gpu: number})
            filled = max(
                (fast_fill(alone, groups) for groups in divisions(alone)),
                key=lambda filled: filled.outcome.score,
            )
            for used, (served, groups) in reached.items():
                both = (served + sum(filled.outcome.num_served), groups + filled.groups)
                if used + number <= count and both[0] > further.get(used + number, (-1, ()))[0]:
                    further[used + number] = both
        reached = further
    wholes = [
        groups
        for _, groups in reached.values()
        if nodes_of(groups, case.gpus, case.gpus_per_node) is not None
    ]
    return max(
        (Filled(g, case.simulated(g)) for g in wholes), key=lambda filled: filled.outcome.score, default=None
    )


# ---------------------------------------------------------------------- algorithm 1: models of the groups


def beam_fill(case: Case, groups: tuple[Group, ...], most: int | None = None) -> Filled:
    """Adds one replica after the other, and goes on with the best few placements. `most`: models of a group."""
    beam = [Filled(groups, case.simulated(groups))]
    best = beam[0]
    while beam and best.outcome.attainment < 1:
        grown = {
            larger
            for filled in beam
            for index, group in enumerate(filled.groups)
            for model in case.placed
            if (most is None or len(group.models) < most) and case.takes(group, model)
            for larger in [_with(filled.groups, index, model)]
        }
        ranked = sorted(grown)  # of equal ones always the same
        beam = sorted(
            (Filled(larger, case.simulated(larger)) for larger in ranked),
            key=lambda filled: filled.outcome.score,
            reverse=True,
        )[:BEAM]
        if beam and beam[0].outcome.score > best.outcome.score:
            best = beam[0]
    return best


def fast_fill(case: Case, groups: tuple[Group, ...], most: int | None = None) -> Filled:
    """One simulation for each replica."""
    best = filled = Filled(groups, case.simulated(groups))
    while best.outcome.attainment < 1:
        outcome = filled.outcome
        missed = [asked - got for asked, got in zip(outcome.num_requests, outcome.num_served, strict=True)]
        for model in sorted(case.placed, key=lambda model: -missed[model]):
            room = [
                index
                for index, group in enumerate(filled.groups)
                if (most is None or len(group.models) < most) and case.takes(group, model)
            ]
            if room and missed[model]:
                break
        else:
            return best
        index = min(room, key=lambda index: (outcome.work[index], len(filled.groups[index].models)))
        larger = list(filled.groups)
        larger[index] = _added(larger[index], model)
        filled = Filled(tuple(larger), case.simulated(larger))
        if filled.outcome.score > best.outcome.score:
            best = filled
    return best


def _added(group: Group, model: int) -> Group:
    return group._replace(models=tuple(sorted((*group.models, model))))


def _with(groups: tuple[Group, ...], index: int, model: int) -> tuple[Group, ...]:
    """In one order: equal groups with exchanged models are the same placement."""
    return tuple(sorted((*groups[:index], _added(groups[index], model), *groups[index + 1 :])))


def _beam_cost(case: Case, groups: Sequence[Group]) -> float:
    """Requests that the beam simulates, at most: every model into every group, for every replica that fits."""
    replicas = kinds = 0
    for group in groups:
        sizes = sorted(
            served.num_bytes for model in case.placed
            if (served := case.table[group.gpu, group.shape][model]) is not None
        )  # fmt: skip
        total = 0
        for size in sizes:
            total += size
            replicas += total <= case.memory[group.gpu]
        kinds += len(sizes)
    return BEAM * replicas * kinds * len(case.trace)


# ---------------------------------------------------------------------- what it is compared with


def replicated(case: Case, most: int | None) -> Filled:
    """Every GPU a group: one model each (`most` 1), or as many as fit (selective replication)."""
    groups = tuple(Group(gpu, ParallelShape(1, 1)) for gpu, count in case.gpus.items() for _ in range(count))
    fill: Callable[..., Filled] = beam_fill if _beam_cost(case, groups) <= MAX_SIMULATED else fast_fill
    return fill(case, groups, most)


def exhaustive(case: Case) -> Filled:
    """The best of all placements: every division, every set of models in every group. For small cases only."""
    best: Filled | None = None
    for groups in divisions(case):
        kinds = sorted(set(groups))
        sets = [list(_subsets(case, kind)) for kind in kinds]
        chosen = [
            combinations_with_replacement(options, groups.count(kind))
            for kind, options in zip(kinds, sets, strict=True)
        ]
        for many in product(*map(list, chosen)):
            placed = tuple(group for part in many for group in part)
            outcome = case.simulated(placed)
            if best is None or outcome.score > best.outcome.score:
                best = Filled(placed, outcome)
    assert best is not None, "one GPU is a group"
    return best


def _subsets(case: Case, empty: Group) -> Iterator[Group]:
    for mask in range(1 << len(case.placed)):
        group: Group | None = empty
        for bit, model in enumerate(case.placed):
            if group is not None and mask >> bit & 1:
                group = _added(group, model) if case.takes(group, model) else None
        if group is not None:
            yield group


def replicas_by_model(groups: Sequence[Group], num_models: int) -> list[list[int]]:
    """Groups of each model."""
    return [[i for i, group in enumerate(groups) if model in group.models] for model in range(num_models)]
