"""Messages between the processes of a group, as msgpack in frames over TCP."""

from collections.abc import Iterable
from typing import Any

import jax
import msgspec
import numpy as np

from ...host.sockets.handshake import Handshake, HandshakeRejected
from ..steps.output import PromptResult


class JoinAccepted(msgspec.Struct, tag="Welcome", frozen=True):
    """Message of rank 0 that the group begins: all ranks have connected, and run the same programs."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Heartbeat of a rank.

    done: number of orders that the rank has completed.
    """

    done: int = 0


class HostArray(msgspec.Struct, array_like=True, frozen=True):
    """Host array: its dtype, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def from_array(cls, x: Any) -> "HostArray":
        """Make the message of an array."""
        x = np.asarray(x)
        return cls(x.dtype.str, x.shape, x.tobytes())

    @property
    def array(self) -> np.ndarray:
        """The array, read-only."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Order(msgspec.Struct, tag=True, frozen=True):
    """Order of rank 0: the program that every rank runs next.

    program: name of the program, such as "run" for a step.
    shape: name of the step's compiled shape; empty for other programs.
    given: leaves of the program's host arguments.
    prompt_results: results that are asked of the step's prompts.
    """

    program: str
    shape: str = ""
    given: tuple[HostArray, ...] = ()
    prompt_results: tuple[PromptResult, ...] = ()

    @classmethod
    def from_tree(
        cls, program: str, shape: str, given: Any, prompt_results: Iterable[PromptResult] = ()
    ) -> "Order":
        """Make the order of a program with a tree of host arguments."""
        arrays = map(HostArray.from_array, jax.tree.leaves(given))
        return cls(program, shape, tuple(arrays), tuple(prompt_results))

    def unflatten(self, abstract: Any) -> Any:
        """Return the program's arguments in the structure of the tree `abstract`."""
        return jax.tree.unflatten(jax.tree.structure(abstract), [numbers.array for numbers in self.given])


class End(msgspec.Struct, tag=True, frozen=True):
    """Message of rank 0 that the group ends."""


GroupMessage = Handshake | JoinAccepted | HandshakeRejected | Beat | Order | End
GROUP_DECODER = msgspec.msgpack.Decoder(GroupMessage)
