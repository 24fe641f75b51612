"""Which algorithms were the fastest on this chip, kept in the cache: a product is measured once.

One small JSON file per chip and version of the library, in `tuned` under the cache folder. An algorithm is kept as its
place among those that the library's heuristic names, which are asked for again at every start: a damaged file
can name a slower algorithm, not a wrong one.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from quire.kernels.cache_files import remove_all, write_whole
from quire.kernels.compile import cache_folder
from quire.kernels.linear.cublaslt import MAX_CANDIDATES, version
from quire.kernels.linear.measure import PYTORCHS
from quire.observe.logs import get_logger

logger = get_logger(__name__)

FORMAT = 1
NAMES = "products-*.json"

Choices = dict[str, dict[int, int]]  # kind of product -> tokens -> place, or PYTORCHS


@dataclass(frozen=True, slots=True)
class ChipKey:
    """Where these choices are the fastest."""

    chip: str
    library: str
    torch: str


def key_of(device: torch.device) -> ChipKey:
    return ChipKey(torch.cuda.get_device_name(device), version(), torch.__version__)


def load(key: ChipKey) -> Choices:
    """What was measured for exactly this. Never raises: a start does not depend on a cache."""
    path = path_of(key)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if (record["format"], record["key"]) != (FORMAT, asdict(key)):
            raise ValueError("it was written for something else")
        return {str(kind): _places(places) for kind, places in record["chosen"].items()}
    except FileNotFoundError:
        return {}
    except Exception as fault:  # a file may be damaged in any way
        logger.debug("%s is passed over, products are measured again: %s", path, fault)
        return {}


def store(key: ChipKey, choices: Choices) -> None:
    """Keeps these beside those that are there."""
    if not choices:
        return
    merged = load(key)
    for kind, places in choices.items():
        merged.setdefault(kind, {}).update(places)
    record = {"format": FORMAT, "key": asdict(key), "chosen": merged}
    write_whole(path_of(key), json.dumps(record, indent=1))


def cached() -> list[tuple[ChipKey, Choices]]:
    """All that is kept and can be read, of whatever chip and version."""
    found = []
    for path in sorted(_folder().glob(NAMES)):
        try:
            key = ChipKey(**json.loads(path.read_text(encoding="utf-8"))["key"])
        except Exception as fault:  # as in `load`
            logger.debug("%s is passed over: %s", path, fault)
            continue
        found.append((key, load(key)))
    return found


def forget() -> int:
    """Removes all that is kept; how many files there were."""
    return remove_all(_folder(), NAMES)


def _folder() -> Path:
    return cache_folder() / "tuned"


def path_of(key: ChipKey) -> Path:
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:20]
    return _folder() / f"products-{digest}.json"


def _places(entries: dict[str, int]) -> dict[int, int]:
    places = {int(tokens): place for tokens, place in entries.items()}
    if not places:
        raise ValueError("a product without a number of tokens")
    for place in places.values():
        if type(place) is not int or not PYTORCHS <= place < MAX_CANDIDATES:
            raise ValueError(f"{place!r} names no algorithm")
    return places
