"""Rejection sampling: whatever a draft proposes, the tokens follow the target's distribution."""

import numpy as np
import pytest
import torch

from quire.sampling import rejection
from quire.sampling.columns import Purpose

NUM = 30_000
TARGETS = {
    "uneven": [0.4, 0.3, 0.15, 0.1, 0.05, 0.0],
    "even": [1 / 6] * 6,
    "certain": [0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
}
DRAFTS = {
    "alike": [0.38, 0.3, 0.17, 0.1, 0.03, 0.02],
    "opposed": [0.0, 0.05, 0.1, 0.15, 0.3, 0.4],
    "narrow": [0.0, 0.5, 0.5, 0.0, 0.0, 0.0],
}


def _chi_squared(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    possible = expected > 0
    assert not counts[~possible].any(), "a token that the target never chooses"
    differences = (counts[possible] - expected[possible]) ** 2 / expected[possible]
    return float(differences.sum()), int(possible.sum()) - 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_tokens_follow_the_targets_distribution(target: str, draft: str, width: int) -> None:
    torch.manual_seed(len(target) * 7 + len(draft) * 3 + width)
    p = torch.tensor(TARGETS[target]).expand(NUM, -1)
    q = torch.tensor(DRAFTS[draft]).expand(NUM, -1)
    children = rejection.draw_distinct(q, torch.rand(NUM, width, dtype=torch.float64))
    judged, resampled = torch.rand(NUM, width, dtype=torch.float64), torch.rand(NUM, dtype=torch.float64)
    chosen = rejection.accept(p, q, children, judged, resampled)
    counts = np.bincount(chosen.numpy(), minlength=6)
    statistic, freedom = _chi_squared(counts, np.array(TARGETS[target]) * NUM)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 1e-6


def test_the_chance_that_a_child_stays_is_what_theory_says() -> None:
    """One child: the sum of min(p, q). With more children it only grows."""
    torch.manual_seed(0)
    p, q = torch.tensor(TARGETS["uneven"]), torch.tensor(DRAFTS["opposed"])
    shares = []
    for width in (1, 2, 3):
        children = rejection.draw_distinct(q.expand(NUM, -1), torch.rand(NUM, width, dtype=torch.float64))
        chosen = rejection.accept(
            p.expand(NUM, -1), q.expand(NUM, -1), children, torch.rand(NUM, width, dtype=torch.float64),
            torch.rand(NUM, dtype=torch.float64),
        )  # fmt: skip
        shares.append(float((children == chosen[:, None]).any(dim=1).float().mean()))
    assert shares[0] == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.01)
    assert shares == sorted(shares)


def test_children_are_drawn_without_replacement() -> None:
    torch.manual_seed(1)
    q = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).expand(NUM, -1)
    drawn = rejection.draw_distinct(q, torch.rand(NUM, 4, dtype=torch.float64))
    assert (drawn[:, 3] == -1).all()  # three tokens have a chance at all
    assert (drawn[:, :3].sort(dim=1).values == torch.arange(3)).all()
    firsts = torch.bincount(drawn[:, 0], minlength=4) / NUM
    torch.testing.assert_close(firsts.float(), q[0], atol=0.01, rtol=0)
    after_zero = drawn[drawn[:, 0] == 0][:, 1]
    assert float((after_zero == 1).float().mean()) == pytest.approx(0.5, abs=0.01)


def test_numbers_are_counted() -> None:
    seeds, indices, positions = np.array([3, 3, 4]), np.array([0, 0, 0]), np.array([7, 8, 7])
    first = rejection.numbers(seeds, indices, positions, Purpose.ACCEPT)
    assert first.shape == (3, rejection.MOST_CHILDREN)
    assert len(np.unique(first)) == first.size
    assert (first == rejection.numbers(seeds, indices, positions, Purpose.ACCEPT)).all()
    assert not (first == rejection.numbers(seeds, indices, positions, Purpose.DRAFT)).any()
