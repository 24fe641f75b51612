"""Pacing: how many prompt tokens a step may have while answers are being generated, by a goal for its duration."""

from quire.core.step import Step

FEWEST = 16  # prompt tokens of a step: a prefill always goes on
FIRST = 256  # before a step with prompts was measured
# `auto`, of a step with prompts:
DECODE_RATIO = 2.5  # the longest duration, in decode steps
SHORTEST = 0.010  # seconds; the least that the longest duration may be
SHORTEST_BUSY = 0.100  # the same while waiting prompts would fill more than BACKLOG steps
BACKLOG = 64
NEWEST = 0.1  # weight of the newest decode step in the estimate of its duration
DECAY = 0.8  # per step with prompts, of the weight of earlier ones


class Pacing:
    """Learns the duration of steps from their results.

    The cost of a token falls with the size of a step. So a step of T tokens at the mean cost of smaller ones ends in
    time, and each measurement brings T closer to the goal.
    """

    def __init__(self, goal: float | None) -> None:
        """`goal`: seconds between two tokens of an answer; None is `auto`."""
        self._goal = goal
        self._decode_seconds = 0.0
        self._tokens = self._seconds = 0.0  # of steps with prompts

    def note(self, step: Step, seconds: float) -> None:
        if step.drafts:
            return
        num_tokens, num_rows = step.total_tokens, len(step.rows)
        if num_tokens > num_rows:
            self._tokens = DECAY * self._tokens + num_tokens
            self._seconds = DECAY * self._seconds + seconds
        elif self._decode_seconds:
            self._decode_seconds += NEWEST * (seconds - self._decode_seconds)
        else:
            self._decode_seconds = seconds

    def prompt_tokens(self, num_rows: int, num_waiting: int) -> int:
        """Prompt tokens beside `num_rows` decodes, while `num_waiting` prompt tokens are in the queue."""
        if not self._tokens:
            return FIRST
        token_seconds = self._seconds / self._tokens
        if self._goal is not None:
            return max(FEWEST, int(self._goal / token_seconds) - num_rows)
        # more rows than the last decode steps had take longer, though no decode step was measured with them
        decode = max(self._decode_seconds, num_rows * token_seconds)
        goal = max(SHORTEST, DECODE_RATIO * decode)
        if num_waiting * token_seconds > BACKLOG * (goal - decode):
            goal = max(SHORTEST_BUSY, goal)
        return max(FEWEST, int(goal / token_seconds) - num_rows)
