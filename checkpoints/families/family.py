"""Description of a model family: everything that reading and writing its checkpoints needs."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...model.config import ModelConfig
from .storage import Stored

# Tensors without effect in files of any family: tables that a rope's fields determine.
BUFFER_PATTERNS = (r"(.*\.)?rotary_emb\.(original_inv_freq|inv_freq|cos_cached|sin_cached)",)


@dataclass(frozen=True)
class Family:
    """Translation between a family's folders and our models.

    parse_config: reads the fields of a `config.json`.
    names: storage of each possible parameter, by our path; `{}` is the layer's number.
    ignored_patterns: patterns of further tensors that change nothing (see BUFFER_PATTERNS). A group `beyond`
        is a layer's number after the last; a group `borrows` is a layer that reads the keys of another.
    alternative_names: alternative storage of some parameters, by our path, in other files of the family.
    """

    parse_config: Callable[[Mapping[str, Any]], ModelConfig]
    names: Mapping[str, Stored]
    ignored_patterns: tuple[str, ...] = ()
    alternative_names: Mapping[str, Stored] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Return the first part of all names but the head's. Files that were saved without the head lack
        it."""
        return self.names["embed"].name.partition(".")[0] + "."

    @property
    def head_prefix(self) -> str:
        """Return the first part of the head's name."""
        return self.names["head"].name.rpartition(".")[0] + "."

    def with_matching_names(self, tensors: Collection[str]) -> "Family":
        """Return the family with the alternative names (`alternative_names`) if a folder's tensors have one
        of them."""
        others = {
            path: stored
            for path, stored in self.alternative_names.items()
            if stored.name != self.names[path].name
        }
        first_names = (stored.name.replace("{}", "0") for stored in others.values())
        return (
            replace(self, names={**self.names, **others})
            if any(name in tensors for name in first_names)
            else self
        )
