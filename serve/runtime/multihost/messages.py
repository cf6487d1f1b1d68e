"""Messages between the processes of a group, as msgpack in frames over TCP."""

from typing import Any

import jax
import msgspec
import numpy as np

from ...host.sockets.handshake import Handshake, HandshakeRejected


class JoinAccepted(msgspec.Struct, tag="Welcome", frozen=True):
    """All ranks are there and run the same: the group begins."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Heartbeat.

    done: number of orders that this rank has completed.
    """

    done: int = 0


class Numbers(msgspec.Struct, array_like=True, frozen=True):
    """A host array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, x: Any) -> "Numbers":
        x = np.asarray(x)
        return cls(x.dtype.str, x.shape, x.tobytes())

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Order(msgspec.Struct, tag=True, frozen=True):
    """Program that every rank runs next.

    program: its name, such as "run" for a step.
    shape: name of the step's compiled shape; empty for other programs.
    given: leaves of its host arguments.
    """

    program: str
    shape: str = ""
    given: tuple[Numbers, ...] = ()

    @classmethod
    def of(cls, program: str, shape: str, given: Any) -> "Order":
        return cls(program, shape, tuple(map(Numbers.of, jax.tree.leaves(given))))

    def tree(self, like: Any) -> Any:
        """Return the arguments in the structure of `like`, a tree of shapes."""
        return jax.tree.unflatten(jax.tree.structure(like), [numbers.array for numbers in self.given])


class End(msgspec.Struct, tag=True, frozen=True):
    """Rank 0 ends the group."""


Message = Handshake | JoinAccepted | HandshakeRejected | Beat | Order | End
DECODER = msgspec.msgpack.Decoder(Message)
