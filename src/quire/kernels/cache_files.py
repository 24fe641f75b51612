"""The cache folder, and small files in it that are written atomically."""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """`$QUIRE_CACHE` or `~/.cache/quire`."""
    return Path(os.environ.get("QUIRE_CACHE") or Path.home() / ".cache" / "quire")


def write_whole(path: Path, text: str) -> None:
    """Replaces the file atomically, and makes its folder: readers and concurrent writers never see a part of it."""
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
    """Removes the files that match; returns their number."""
    files = list(folder.glob(pattern))
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
