"""Beam search written out: whole lists of tokens, every candidate, no sharing. What the engine must give."""

import zlib
from collections.abc import Sequence

from tests.engine.page_runner import END, VOCABULARY


def token_scores(token_ids: Sequence[int]) -> list[float]:
    """A log probability for each token that may follow; multiples of 1/64, so that sums are exact and ties happen."""
    text = ",".join(map(str, token_ids))
    return [-1.0 - zlib.crc32(f"{text}>{token}".encode()) % 400 / 64 for token in range(VOCABULARY)]


def expected_beams(
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[tuple[list[int], float]]:
    """(output, log probability) of every hypothesis, best first."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int], float]] = []
    while True:
        candidates = [
            (score + more, [*output, token])
            for score, output in beams
            for token, more in enumerate(token_scores([*prompt, *output]))
        ]
        candidates.sort(key=lambda one: -one[0])
        length = len(beams[0][1]) + 1
        is_last = length == max_tokens
        for score, output in candidates[:width]:
            if output[-1] == END or is_last:
                ended.append((score / length**length_penalty, output, score))
        ended = sorted(ended, key=lambda one: -one[0])[:width]
        beams = [(score, output) for score, output in candidates if output[-1] != END][:width]
        is_full = len(ended) == width
        reach = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        hopeless = is_full and beams[0][0] / reach**length_penalty <= ended[-1][0]
        if is_last or hopeless or (is_full and (early_stopping is True or width == 1)):
            return [(output, score) for _, output, score in ended]
