"""Sites: where adapters can be attached to a model, by the names that checkpoints use."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Checkpoints of the bare model lack the outer module's name, and some add one more.
PREFIXES = ("model.decoder.", "model.", "decoder.", "transformer.", "")


@dataclass(frozen=True, slots=True)
class Site:
    """One matrix of the model as an adapter sees it."""

    name: str  # the module's, such as "model.layers.0.self_attn.q_proj"
    num_in: int  # the vocabulary, for an embedding
    num_out: int
    is_embedding: bool = False

    @property
    def part(self) -> str:
        """The module's own name, the same in every layer, as `target_modules` usually lists it."""
        return self.name.rpartition(".")[2]


class Sites(Sequence[Site]):
    """All sites of one model; a site's index is its number in every table."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = tuple(sites)
        self._indices = {site.name: i for i, site in enumerate(self._sites)}

    def find(self, module: str) -> int | None:
        """The index of a module's site, with any of the known outer prefixes."""
        if module in self._indices:
            return self._indices[module]
        for prefix in PREFIXES:
            if module.startswith(prefix):
                for other in PREFIXES:
                    index = self._indices.get(other + module[len(prefix) :])
                    if index is not None:
                        return index
        return None

    def __getitem__(self, index: int) -> Site:  # type: ignore[override]
        return self._sites[index]

    def __len__(self) -> int:
        return len(self._sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)
