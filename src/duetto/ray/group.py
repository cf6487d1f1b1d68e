"""Process group of a replica that needs several actors. Ranks other than 0 are actors in its placement
group."""

import secrets
import tempfile
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..serve.llm.llm import LLM
from ..serve.runtime.multihost.rendezvous import current_group
from ..serve.runtime.multihost.supervisor import free_port

RESOURCE_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # options of an actor, and their names in bundles


class RankActor:
    """Actor of a rank other than 0, which ends with its group."""

    def serve(self, source: str | None, keywords: Mapping[str, Any], key: str) -> None:
        """Hold a part of the model until rank 0 ends. Does not return."""
        start_rank(source, keywords, key)


def start_rank(source: str | None, keywords: Mapping[str, Any], key: str) -> LLM:
    """Start a model as a rank of a group, whose processes share `key`. Returns on rank 0 only."""
    with tempfile.NamedTemporaryFile("w", prefix="duetto-group-") as file:
        file.write(key)
        file.flush()
        llm_keywords: dict[str, Any] = dict(keywords) | {"cluster_key_file": file.name}
        return LLM(source, **llm_keywords)


class RankActors:
    """Ranks of a replica's model: rank 0 is this process, the others are actors with the same resources.

    source: folder or id of the model.
    keywords: of `LLM`, with `nnodes`.
    actor: Ray options of each actor.
    """

    def __init__(self, source: str | None, keywords: Mapping[str, Any], actor: Mapping[str, Any]):
        ray, self._source, self._key = import_module("ray"), source, secrets.token_hex(32)
        address = {"master_addr": ray.util.get_node_ip_address(), "master_port": free_port()}
        self._keywords = address | dict(keywords)
        make = ray.remote(RankActor).options(**({"num_cpus": 1} | dict(actor))).remote
        self._actors = [make() for _ in range(1, keywords["nnodes"])]
        for i, rank_actor in enumerate(self._actors):
            rank_actor.serve.remote(source, self._keywords | {"node_rank": i + 1}, self._key)

    def start(self) -> LLM:
        """Start rank 0 after all others have joined. Raises the errors of `LLM`."""
        return start_rank(self._source, self._keywords, self._key)


def leave_group() -> None:
    """End the group of this process, if it has one."""
    if (process_group := current_group()) is not None:
        process_group.end_group()


def rank_bundles(nnodes: int, actor: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the resources of each rank; the first bundle is for the replica itself."""
    amounts = {name: actor.get(option, 0) for option, name in RESOURCE_NAMES.items()}
    wanted = amounts | {"CPU": actor.get("num_cpus", 1)} | dict(actor.get("resources", {}))
    return [{name: amount for name, amount in wanted.items() if amount} for _ in range(nnodes)]
