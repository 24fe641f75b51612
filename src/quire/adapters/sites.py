"""Sites: where adapters can be attached to a model, by the names that checkpoints use."""

from dataclasses import dataclass
from functools import cached_property

# Checkpoints of the bare model lack the outer module's name, and some add one more.
PREFIXES = (
    *("model.decoder.", "model.", "decoder.", "transformer.", "gpt_neox.", ""),
    *("model.language_model.", "language_model.model.", "language_model."),  # beside an encoder of images
)


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


class Sites(tuple[Site, ...]):
    """All sites of one model; a site's index is its number in every table."""

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {site.name: i for i, site in enumerate(self)}

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
