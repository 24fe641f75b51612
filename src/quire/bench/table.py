"""Aligned text: the readable form of every report."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Rows in columns, two spaces apart; the columns in `right` are flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def in_bytes(count: float) -> str:
    """1,234 B, 98.4 MB, 16.1 GB: in 1000s, three digits."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            value = count / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{count:.0f} B"


def counted(count: int, noun: str) -> str:
    """1 user, 2 users."""
    return f"{count} {noun}{'s' * (count != 1)}"


def in_seconds(seconds: float) -> str:
    """1.23 s, 45.6 ms, 12.3 µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
