"""What a request for beam search may ask for, checked before anything runs."""

import math
from typing import TYPE_CHECKING, Any

from quire.core.errors import InvalidRequest

if TYPE_CHECKING:
    from quire.core.sampling import SamplingParams

MAX_BEAM_WIDTH = 32
# in place of a model's own advice on drawing
NOTHING_DRAWN: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def check_no_beams(sampling: "SamplingParams") -> None:
    """Without beam search its parameters would be ignored."""
    given = {
        "length_penalty": sampling.length_penalty != 1.0,
        "early_stopping": sampling.early_stopping is not False,
    }
    for name, is_given in given.items():
        if is_given:
            raise InvalidRequest(f"{name} is for beam search: set use_beam_search, or leave it out", name)


def check_beam_params(sampling: "SamplingParams") -> None:
    """Raises InvalidRequest, naming the field, for what beam search cannot do or would ignore."""
    width = sampling.num_sequences
    if isinstance(width, int) and not 1 <= width <= MAX_BEAM_WIDTH:
        param = "n" if sampling.best_of is None else "best_of"
        raise InvalidRequest(
            f"{param}={width} asks for a beam width outside 1 to {MAX_BEAM_WIDTH}: choose one within", param
        )
    penalty = sampling.length_penalty
    if not isinstance(penalty, (int, float)) or not math.isfinite(penalty) or not -10.0 <= penalty <= 10.0:
        raise InvalidRequest(
            f"length_penalty={penalty!r} is outside [-10, 10]: choose a value within", "length_penalty"
        )
    if sampling.early_stopping not in (True, False, "never"):
        raise InvalidRequest(
            f'early_stopping={sampling.early_stopping!r} is not known: choose true, false or "never"',
            "early_stopping",
        )
    for name, neutral in NOTHING_DRAWN.items():
        value = getattr(sampling, name)
        if value != neutral and not (name == "temperature" and value == 1.0):
            raise InvalidRequest(
                f"{name}={value!r} has no meaning in beam search, which draws nothing: leave it out", name
            )
    if sampling.stop:
        raise InvalidRequest(
            "beams have no text before the end, so stop strings cannot end them: use stop_token_ids", "stop"
        )
