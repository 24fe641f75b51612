"""What steps take: seconds per prefill token, and how many a step may have while answers are being generated."""

FEWEST = 16  # prompt tokens of a step: a prefill always goes on
FIRST = 256  # before a step with prompts was measured
GROWTH = 1.1  # of a step over the measured ones, at most
WHOLE, LARGE = 16, 256  # tokens; steps are multiples of WHOLE, from LARGE on of 4 × WHOLE
LEAST_SHARE = 0.75  # of a planned step's tokens that another must have to be measured
# `auto`, of a step with prompts:
DECODE_RATIO = 2.4  # the longest duration, in decode steps
SHORTEST = 0.010  # seconds; the least that the longest duration may be
SHORTEST_BUSY = 0.100  # the same while waiting prompts would fill more than BACKLOG steps
BACKLOG = 60
NEWEST = 0.1  # weight of the newest decode step in the estimate of its duration
DECAY = 0.98  # per step, of the weight of earlier ones in the line of PromptSpeed
PROMPT_DECAY = 0.5  # per step with prompts, in Pacing: a prompt's tokens cost more the longer it already is


class PromptSpeed:
    """Seconds per additional prefill token of a step: the slope of a line fitted to the last steps.

    No measurement at start is needed: a preempted group has been prefilled here before.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        keep = DECAY
        self._weight = keep * self._weight + 1.0
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds
        self._squares = keep * self._squares + num_tokens * num_tokens
        self._products = keep * self._products + num_tokens * seconds

    @property
    def token_seconds(self) -> float:
        """0 before the first step."""
        if not self._tokens:
            return 0.0
        mean = self._seconds / self._tokens
        spread = self._weight * self._squares - self._tokens**2
        if spread <= 0.01 * self._tokens**2:
            return mean  # steps of one size only: no line can be fitted
        slope = (self._weight * self._products - self._tokens * self._seconds) / spread
        return min(mean, slope) if slope > 0.0 else mean


class Pacing:
    """Learns the duration of steps from their results.

    A step takes as long as a decode step and each further token its share, so a line through both gives the size that
    ends in time. A GPU's cost per token rises where arithmetic begins to bound: the line overestimates the size there,
    and a step is at most GROWTH times as large as the measured ones, or as large as their mean cost per token allows.
    """

    def __init__(self, goal: float | None) -> None:
        """`goal`: seconds between two tokens of an answer; None is `auto`."""
        self._goal = goal
        self._decode_seconds = self._decode_rows = 0.0
        self._steps = self._tokens = self._seconds = 0.0  # of steps with prompts
        self._planned = 0  # tokens of the last step that prompts were cut for

    def note(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Of a step that verified no drafts. A step much smaller than the planned one says little about it."""
        if num_tokens > num_rows:
            if num_tokens < LEAST_SHARE * self._planned:
                return
            self._steps = PROMPT_DECAY * self._steps + 1.0
            self._tokens = PROMPT_DECAY * self._tokens + num_tokens
            self._seconds = PROMPT_DECAY * self._seconds + seconds
        else:
            weight = NEWEST if self._decode_seconds else 1.0
            self._decode_seconds += weight * (seconds - self._decode_seconds)
            self._decode_rows += weight * (num_rows - self._decode_rows)

    def prompt_tokens(self, num_rows: int, num_waiting: int) -> int:
        """Prompt tokens beside `num_rows` decodes, while `num_waiting` prompt tokens are in the queue."""
        if not self._tokens:
            return FIRST
        token_seconds = self._seconds / self._tokens
        goal = self._goal
        if goal is None:
            goal = self._auto(num_rows, num_waiting, token_seconds)
        tokens = goal / token_seconds
        further = self._tokens - self._steps * self._decode_rows
        further_seconds = self._seconds - self._steps * self._decode_seconds
        # they are not where the last decode steps had far more rows
        if further > 0.0 and further_seconds > 0.0:
            measured = self._tokens / self._steps
            line = self._decode_rows + (goal - self._decode_seconds) * further / further_seconds
            tokens = min(line, max(tokens, GROWTH * measured, measured + WHOLE))
        multiple = WHOLE if tokens < LARGE else 4 * WHOLE  # as GEMMs and graphs are
        self._planned = max(num_rows + FEWEST, round(tokens / multiple) * multiple)
        return self._planned - num_rows

    def _auto(self, num_rows: int, num_waiting: int, token_seconds: float) -> float:
        # more rows than the last decode steps had take longer, though no decode step was measured with them
        decode = max(self._decode_seconds, num_rows * token_seconds)
        goal = max(SHORTEST, DECODE_RATIO * decode)
        if num_waiting * token_seconds > BACKLOG * (goal - decode):
            return max(SHORTEST_BUSY, goal)
        return goal
