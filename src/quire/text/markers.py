"""Finding a marker in a text that comes in pieces."""


def held_from(text: str, marker: str) -> int:
    """Where the end of `text` begins that must wait: white space, then what may become `marker`.

    White space waits too, since around markers it belongs to the format and not to the answer.
    """
    cut = len(text)
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            cut -= length
            break
    return len(text[:cut].rstrip())
