"""A graph index as the papers and lectures draw it (HNSW, Malkov and Yashunin), in numpy, to be read and counted.

Every vector is a node of layer 0; each further layer holds about 1/M of the one below. A search walks greedily from the
top, and in layer 0 keeps the `ef` best nodes that it has seen. Distances that are computed are counted.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy

METRICS = ("cosine", "euclidean")
BUILD_AT_ONCE = 16  # nodes whose links are followed together while the graph is built
PROGRESS_NODES = 1000  # inserted between two calls of `progress`


@dataclass(slots=True)
class Visits:
    """What one search did."""

    distances: int = 0
    path: list[tuple[int, int]] = field(default_factory=list)  # (layer, node) of each step down and along


class Hnsw:
    """`links[layer][node]` are the node's neighbours there."""

    def __init__(
        self,
        vectors: numpy.ndarray,
        metric: str = "cosine",
        m: int = 16,
        ef_construct: int = 100,
        seed: int = 0,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Of all rows of `vectors`, [count, width] float32, inserted in order. `progress` is told how many are."""
        self.metric, self._m, self._ef_construct = metric, m, ef_construct
        self.vectors = _prepared(vectors, metric)
        self._squares = (self.vectors**2).sum(axis=1)
        draws = numpy.random.default_rng(seed).random(len(vectors))
        self.layer_of = numpy.floor(-numpy.log(1 - draws) / math.log(m)).astype(int)  # exponentially fewer
        self.links: list[dict[int, list[int]]] = []
        self._entry = -1
        self._seen = numpy.zeros(len(vectors), numpy.int64)  # the search that saw each node last
        self._searches = 0
        for node in range(len(vectors)):
            self._insert(node)
            if (node + 1) % PROGRESS_NODES == 0:
                progress(node + 1)

    def search(self, query: numpy.ndarray, k: int, ef: int) -> tuple[list[int], Visits]:
        """The `k` nearest nodes that are found, the nearest first, and what it took."""
        visits = Visits()
        vector = _prepared(query[None], self.metric)[0]
        start = self._descend(vector, len(self.links) - 1, 0, visits)
        reached, _ = self._search_layer(vector, numpy.array([start]), max(ef, k), 0, visits)
        return reached[:k].tolist(), visits

    def exact(self, query: numpy.ndarray, k: int) -> list[int]:
        distances = self._distances(
            _prepared(query[None], self.metric)[0], numpy.arange(len(self.vectors)), Visits()
        )
        return [int(node) for node in numpy.argsort(distances, kind="stable")[:k]]

    def _insert(self, node: int) -> None:
        layer, vector, visits = int(self.layer_of[node]), self.vectors[node], Visits()
        top = len(self.links) - 1
        while len(self.links) <= layer:
            self.links.append({})
        if self._entry < 0:
            self._entry = node
            for below in range(layer + 1):
                self.links[below][node] = []
            return
        near = numpy.array([self._descend(vector, top, layer, visits)])
        for below in range(min(layer, top), -1, -1):
            near, distances = self._search_layer(
                vector, near, self._ef_construct, below, visits, BUILD_AT_ONCE
            )
            room = 2 * self._m if below == 0 else self._m
            self.links[below][node] = self._chosen(near, distances, self._m)
            for neighbour in self.links[below][node]:
                self._link(neighbour, node, below, room)
        for above in range(top + 1, layer + 1):
            self.links[above][node] = []
        if layer > top:
            self._entry = node

    def _link(self, node: int, other: int, layer: int, room: int) -> None:
        """Links beyond `room` are cut when there are half as many again, not each time."""
        links = self.links[layer][node]
        links.append(other)
        if len(links) > room * 3 // 2:
            nodes = numpy.array(links)
            distances = self._distances(self.vectors[node], nodes, Visits())
            order = numpy.argsort(distances, kind="stable")
            self.links[layer][node] = self._chosen(nodes[order], distances[order], room)

    def _chosen(self, nodes: numpy.ndarray, distances: numpy.ndarray, room: int) -> list[int]:
        """The nearest first, without nodes that are nearer to a chosen one: links in all directions."""
        vectors, squares = self.vectors[nodes], self._squares[nodes]
        chosen: list[int] = []
        left: list[int] = []
        nearest = numpy.full(len(nodes), numpy.inf, numpy.float32)  # of each candidate to a chosen one
        for at, distance in enumerate(distances.tolist()):
            if len(chosen) == room:
                break
            if nearest[at] < distance:
                left.append(at)
            else:
                chosen.append(at)
                numpy.minimum(nearest, self._between(vectors[at], vectors, squares), out=nearest)
        return [int(nodes[at]) for at in chosen + left[: room - len(chosen)]]

    def _descend(self, vector: numpy.ndarray, top: int, layer: int, visits: Visits) -> int:
        """Greedily from the entry down to above `layer`: the nearest node there."""
        node = self._entry
        distance = float(self._distances(vector, numpy.array([node]), visits)[0])
        for above in range(top, layer, -1):
            while True:
                visits.path.append((above, node))
                links = self.links[above][node]
                if not links:
                    break
                distances = self._distances(vector, numpy.array(links), visits)
                best = int(distances.argmin())
                if distances[best] >= distance:
                    break
                distance, node = float(distances[best]), links[best]
        return node

    def _search_layer(
        self,
        vector: numpy.ndarray,
        starts: numpy.ndarray,
        ef: int,
        layer: int,
        visits: Visits,
        at_once: int = 1,
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The `ef` nearest nodes that are reached from `starts`, the nearest first, and their distances.

        Follows the links of the nearest nodes that it has not left yet, `at_once` of them together: more than one takes
        a few distances more, and less time.
        """
        self._searches += 1
        self._seen[starts] = self._searches
        links = self.links[layer]
        nodes, distances = starts, self._distances(vector, starts, visits)
        is_left = numpy.zeros(len(nodes), bool)
        while (leaving := numpy.flatnonzero(~is_left)[:at_once]).size:
            is_left[leaving] = True
            left = nodes[leaving].tolist()
            visits.path += [(layer, node) for node in left]
            reached = numpy.unique(
                numpy.array([other for node in left for other in links[node]], numpy.int64)
            )
            fresh = reached[self._seen[reached] != self._searches]
            self._seen[fresh] = self._searches
            nodes = numpy.concatenate((nodes, fresh))
            distances = numpy.concatenate((distances, self._distances(vector, fresh, visits)))
            is_left = numpy.concatenate((is_left, numpy.zeros(len(fresh), bool)))
            order = numpy.argsort(distances, kind="stable")[:ef]
            nodes, distances, is_left = nodes[order], distances[order], is_left[order]
        return nodes, distances

    def _distances(self, vector: numpy.ndarray, nodes: numpy.ndarray, visits: Visits) -> numpy.ndarray:
        visits.distances += len(nodes)
        return self._between(vector, self.vectors[nodes], self._squares[nodes])

    def _between(
        self, vector: numpy.ndarray, vectors: numpy.ndarray, squares: numpy.ndarray
    ) -> numpy.ndarray:
        """1 − cosine, or the squared Euclidean distance. Row by row: threads would cost more than they save."""
        products = numpy.vecdot(vectors, vector)
        if self.metric == "cosine":
            return 1 - products
        return squares - 2 * products + float(vector @ vector)


def _prepared(vectors: numpy.ndarray, metric: str) -> numpy.ndarray:
    vectors = vectors.astype(numpy.float32)
    if metric == "cosine":
        return vectors / numpy.maximum(numpy.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors


def clustered(count: int, width: int, seed: int, num_clusters: int = 200) -> numpy.ndarray:
    """Vectors around random centres, as embeddings lie around topics: [count, width] float32."""
    random = numpy.random.default_rng(seed)
    centres = random.normal(size=(num_clusters, width)).astype(numpy.float32)
    spread = random.normal(size=(count, width)).astype(numpy.float32)
    return centres[random.integers(num_clusters, size=count)] + 0.7 * spread
