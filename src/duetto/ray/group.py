"""Process group of a replica that needs several actors: each rank but 0 is one of the replica's placement
group."""

import secrets
import tempfile
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..serve.llm.llm import LLM
from ..serve.runtime.multihost.rendezvous import group
from ..serve.runtime.multihost.supervisor import free_port

RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # options of an actor, and their names in bundles


class RankActor:
    """A rank other than 0, which ends with its group."""

    def serve(self, source: str | None, keywords: Mapping[str, Any], key: str) -> None:
        """Hold a part of the model until rank 0 ends. Does not return."""
        joined(source, keywords, key)


def joined(source: str | None, keywords: Mapping[str, Any], key: str) -> LLM:
    """Start a model as a rank of a group whose processes share a key. Only rank 0 returns."""
    with tempfile.NamedTemporaryFile("w", prefix="duetto-group-") as file:
        file.write(key)
        file.flush()
        own: dict[str, Any] = dict(keywords) | {"cluster_key_file": file.name}
        return LLM(source, **own)


class RankActors:
    """The ranks of a replica's model. Rank 0 is this process, the others are actors with the same resources.

    source: of the model. keywords: of `LLM`, with `nnodes`. actor: options of each actor.
    """

    def __init__(self, source: str | None, keywords: Mapping[str, Any], actor: Mapping[str, Any]):
        ray, self._source, self._key = import_module("ray"), source, secrets.token_hex(32)
        address = {"master_addr": ray.util.get_node_ip_address(), "master_port": free_port()}
        self._keywords = address | dict(keywords)
        make = ray.remote(RankActor).options(**({"num_cpus": 1} | dict(actor))).remote
        self._actors = [make() for _ in range(1, keywords["nnodes"])]
        for i, own in enumerate(self._actors):
            own.serve.remote(source, self._keywords | {"node_rank": i + 1}, self._key)

    def start(self) -> LLM:
        """Start rank 0 once all others have joined. Raises as `LLM`."""
        return joined(self._source, self._keywords, self._key)


def leave() -> None:
    """End the group of this process, if it has one."""
    if (found := group()) is not None:
        found.end()


def bundles(nnodes: int, actor: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return a bundle of resources for each rank, the first for the replica itself."""
    named = {name: actor.get(option, 0) for option, name in RESOURCES.items()}
    wanted = named | {"CPU": actor.get("num_cpus", 1)} | dict(actor.get("resources", {}))
    return [{name: amount for name, amount in wanted.items() if amount} for _ in range(nnodes)]
