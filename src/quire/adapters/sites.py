"""Sites: where adapters can be attached to a model, by the names that checkpoints use."""

from dataclasses import dataclass
from functools import cached_property

from quire.weights.source import spellings


@dataclass(frozen=True, slots=True)
class Site:
    """One matrix of the model as an adapter sees it."""

    name: str  # the module's, such as "model.layers.0.self_attn.q_proj"
    num_inputs: int  # of an embedding: its ids
    num_outputs: int
    is_embedding: bool = False

    @property
    def part(self) -> str:
        """The module's own name, the same in every layer, as `target_modules` usually lists it."""
        return self.name.rpartition(".")[2]


class Sites(tuple[Site, ...]):
    """All sites of one model; a site's index is its number in every table."""

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {site.name: i for i, site in enumerate(self)}

    def find(self, module: str) -> int | None:
        """The index of a module's site, with any of the known outer prefixes."""
        return next((self._indices[name] for name in spellings(module) if name in self._indices), None)
