"""Sizes as people write them: 2GiB, 512M, 1.5e9."""

import argparse
import re

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str) -> int:
    """Bytes. K, M, G, T and KiB… count in 1024s, KB, MB, GB, TB in 1000s; a plain number is bytes."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?b?)\s*", text.lower())
    try:
        if match is None or match[3] == "i":
            raise ValueError
        base = 1000 if match[2] and match[3] == "b" else 1024
        return int(float(match[1]) * base ** _POWERS[match[2]])
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: write 2GiB, 512M or a number of bytes"
        ) from None


def parse_gigabytes(text: str) -> int:
    """As parse_bytes, but a plain number is in GB (1e9): people say "an 80 GB card"."""
    plain = re.fullmatch(r"\s*[0-9.]+\s*", text)
    return parse_bytes(f"{text.strip()}GB" if plain else text)
