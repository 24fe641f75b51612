"""A graph index as the papers and lectures draw it (HNSW, Malkov and Yashunin), in numpy, to be read and counted.

Every vector is a node of layer 0; each further layer holds about 1/M of the one below. A search walks greedily from the
top, and in layer 0 keeps the `ef` best nodes that it has seen. Distances that are computed are counted.
"""

import heapq
import math
from dataclasses import dataclass, field

import numpy

METRICS = ("cosine", "euclidean")


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
    ) -> None:
        """Of all rows of `vectors`, [count, width] float32, inserted in order."""
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

    def search(self, query: numpy.ndarray, k: int, ef: int) -> tuple[list[int], Visits]:
        """The `k` nearest nodes that are found, the nearest first, and what it took."""
        visits = Visits()
        vector = _prepared(query[None], self.metric)[0]
        nearest = self._descend(vector, len(self.links) - 1, 0, visits)
        reached = self._search_layer(vector, [nearest], max(ef, k), 0, visits)
        return [node for _, node in reached[:k]], visits

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
        nearest = self._descend(vector, top, layer, visits)
        starts = [nearest]
        for below in range(min(layer, top), -1, -1):
            candidates = self._search_layer(vector, starts, self._ef_construct, below, visits)
            room = 2 * self._m if below == 0 else self._m
            self.links[below][node] = self._chosen(candidates, self._m)
            for neighbour in self.links[below][node]:
                self._link(neighbour, node, below, room)
            starts = candidates
        for above in range(top + 1, layer + 1):
            self.links[above][node] = []
        if layer > top:
            self._entry = node

    def _link(self, node: int, other: int, layer: int, room: int) -> None:
        """Links beyond `room` are cut when there are half as many again, not each time."""
        links = self.links[layer][node]
        links.append(other)
        if len(links) > room * 3 // 2:
            distances = self._distances(self.vectors[node], numpy.array(links), Visits())
            self.links[layer][node] = self._chosen(sorted(zip(distances.tolist(), links, strict=True)), room)

    def _chosen(self, candidates: list[tuple[float, int]], room: int) -> list[int]:
        """The nearest first, without nodes that are nearer to a chosen one: links in all directions."""
        nodes = numpy.array([node for _, node in candidates])
        between = self._pairs(nodes)
        chosen: list[int] = []
        left: list[int] = []
        nearest = numpy.full(len(nodes), numpy.inf, numpy.float32)  # of each candidate to a chosen one
        for at, (distance, _) in enumerate(candidates):
            if len(chosen) == room:
                break
            if nearest[at] < distance:
                left.append(at)
            else:
                chosen.append(at)
                numpy.minimum(nearest, between[at], out=nearest)
        return [int(nodes[at]) for at in chosen + left[: room - len(chosen)]]

    def _pairs(self, nodes: numpy.ndarray) -> numpy.ndarray:
        """Distances between all of them."""
        products = self.vectors[nodes] @ self.vectors[nodes].T
        if self.metric == "cosine":
            return 1 - products
        return self._squares[nodes][:, None] + self._squares[nodes][None] - 2 * products

    def _descend(self, vector: numpy.ndarray, top: int, layer: int, visits: Visits) -> tuple[float, int]:
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
        return distance, node

    def _search_layer(
        self, vector: numpy.ndarray, starts: list[tuple[float, int]], ef: int, layer: int, visits: Visits
    ) -> list[tuple[float, int]]:
        """The `ef` nearest that are reached from `starts`, the nearest first."""
        self._searches += 1
        self._seen[[node for _, node in starts]] = self._searches
        waiting = list(starts)
        heapq.heapify(waiting)
        best = [(-distance, node) for distance, node in starts]  # the farthest on top
        heapq.heapify(best)
        while waiting:
            distance, node = heapq.heappop(waiting)
            if len(best) >= ef and distance > -best[0][0]:
                break
            visits.path.append((layer, node))
            links = numpy.array(self.links[layer][node], numpy.int64)
            fresh = links[self._seen[links] != self._searches] if links.size else links
            if not fresh.size:
                continue
            self._seen[fresh] = self._searches
            for near, other in zip(
                self._distances(vector, fresh, visits).tolist(), fresh.tolist(), strict=True
            ):
                if len(best) < ef or near < -best[0][0]:
                    heapq.heappush(waiting, (near, other))
                    heapq.heappush(best, (-near, other))
                    if len(best) > ef:
                        heapq.heappop(best)
        return sorted((-distance, node) for distance, node in best)

    def _distances(self, vector: numpy.ndarray, nodes: numpy.ndarray, visits: Visits) -> numpy.ndarray:
        """1 − cosine, or the squared Euclidean distance."""
        visits.distances += len(nodes)
        products = self.vectors[nodes] @ vector
        if self.metric == "cosine":
            return 1 - products
        return self._squares[nodes] - 2 * products + float(vector @ vector)


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
