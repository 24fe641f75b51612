"""The laboratory's own graph index, and the scores of answers."""

import numpy
import pytest

from quire_lab.experiments.rag import contains, exact_match, f1
from quire_lab.measure.hnsw import METRICS, Hnsw, clustered


@pytest.mark.parametrize("metric", METRICS)
def test_a_graph_finds_the_nearest_with_few_distances(metric: str) -> None:
    rows = clustered(1020, 32, seed=3, num_clusters=20)
    graph = Hnsw(rows[:1000], metric, m=8, ef_construct=40)
    reached, distances = 0, 0
    for query in rows[1000:]:
        nodes, visits = graph.search(query, 10, 64)
        order = numpy.linalg.norm(rows[:1000] - query, axis=1)
        if metric == "cosine":
            order = -(rows[:1000] @ query) / numpy.linalg.norm(rows[:1000], axis=1)
        truth = numpy.argsort(order, kind="stable")[:10].tolist()
        assert graph.exact(query, 10) == truth
        reached += len(set(truth) & set(nodes))
        distances += visits.distances
    assert reached / 200 > 0.95
    assert distances / 20 < 500


def test_layers_thin_out_and_links_stay_in_them() -> None:
    graph = Hnsw(clustered(800, 8, seed=1), "euclidean", m=4, ef_construct=20)
    sizes = [len(layer) for layer in graph.links]
    assert sizes[0] == 800
    assert all(upper < lower for lower, upper in zip(sizes, sizes[1:], strict=False))  # noqa: RUF007
    for layer in graph.links:
        assert all(other in layer and other != node for node, others in layer.items() for other in others)
    assert max(len(others) for others in graph.links[0].values()) <= 3 * 4


def test_scores_of_answers_are_squads() -> None:
    assert exact_match("The Steelers.", "steelers") == 1
    assert f1("It was the Pittsburgh Steelers", "Pittsburgh Steelers") == pytest.approx(2 * 2 / (4 + 2))
    assert contains("They beat the Pittsburgh Steelers, 23 to 16", "Pittsburgh Steelers") == 1
    assert contains("3080 points", "308") == 0
