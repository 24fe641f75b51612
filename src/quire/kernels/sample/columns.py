"""How a row's sampling parameters lie on a device: 32-bit words, eight for the choice and eight for penalties."""

from enum import IntEnum

WORDS = 16


class Word(IntEnum):
    """What each word holds. Floats are fp32 by their bits."""

    TEMPERATURE = 0  # 0 means greedy
    TOP_K = 1  # 0 is off
    TOP_P = 2  # 1 is off
    MIN_P = 3  # 0 is off
    KEY_LOW = 4  # of the row's stream of random numbers
    KEY_HIGH = 5
    ROW = 6  # the row's own id
    REPETITION = 8  # 1 is off
    PRESENCE = 9  # 0 is off
    FREQUENCY = 10  # 0 is off
    PROMPT = 11  # tokens of the prompt, which presence and frequency leave out
