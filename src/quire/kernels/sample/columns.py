"""How a row's sampling parameters lie on a device: eight 32-bit words, one sector of memory for one row."""

from enum import IntEnum

WORDS = 8


class Word(IntEnum):
    """What each word holds. Floats are fp32 by their bits."""

    TEMPERATURE = 0  # 0 means greedy
    TOP_K = 1  # 0 is off
    TOP_P = 2  # 1 is off
    MIN_P = 3  # 0 is off
    KEY_LOW = 4  # of the row's stream of random numbers
    KEY_HIGH = 5
    ROW = 6  # the row's own id
