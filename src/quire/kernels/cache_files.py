"""Small files in the cache: there whole or not at all, and removed by their names' pattern."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replaces the file, and makes its folder. A reader never sees half of it, whoever else writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def remove_all(folder: Path, pattern: str) -> int:
    """How many there were, readable or not."""
    files = list(folder.glob(pattern))
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
