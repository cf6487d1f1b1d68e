"""Description of a model family: everything that loading and saving its checkpoints needs."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...model.config import ModelConfig
from .stored import Stored


@dataclass(frozen=True)
class Family:
    """A translation: `config` reads the fields of a `config.json`, `names` says where each parameter is
    stored.

    names: path of our parameter, `{}` for the layer's number -> tensor in the file, for every parameter that
    it may have.
    ignored: patterns of tensors that a file may hold beside them and that change nothing; a group `beyond`
    must be the number of a layer after the last, a group `borrows` that of one that reads another's keys.
    prefix: the first part of all names but the head's, which some of the family's files leave out.
    also: names under which other files of the family store some of the parameters.
    """

    config: Callable[[Mapping[str, Any]], ModelConfig]
    names: Mapping[str, Stored]
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    also: Mapping[str, Stored] = field(default_factory=dict)

    def stored_in(self, tensors: Collection[str]) -> "Family":
        """The family with those of its names that a folder's tensors have."""
        others = {path: own for path, own in self.also.items() if own.name != self.names[path].name}
        first = (own.name.replace("{}", "0") for own in others.values())
        return (
            replace(self, names={**self.names, **others}) if any(name in tensors for name in first) else self
        )
