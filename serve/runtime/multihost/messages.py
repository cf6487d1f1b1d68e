"""What the processes of a group tell each other, as msgpack in frames over TCP."""

from typing import Any

import jax
import msgspec
import numpy as np

from ...host.sockets.handshake import Handshake, HandshakeRejected


class JoinAccepted(msgspec.Struct, tag="Welcome", frozen=True):
    """Rank 0's answer to a rank that runs the same."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    """A sign of life, with the number of orders that are done."""

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
    """A program that all run next, with what the host gives it; of a step, its shape."""

    program: str
    shape: str = ""
    given: tuple[Numbers, ...] = ()

    @classmethod
    def of(cls, program: str, shape: str, given: Any) -> "Order":
        return cls(program, shape, tuple(map(Numbers.of, jax.tree.leaves(given))))

    def tree(self, like: Any) -> Any:
        """What was given, in the structure of a tree of shapes."""
        return jax.tree.unflatten(jax.tree.structure(like), [numbers.array for numbers in self.given])


class End(msgspec.Struct, tag=True, frozen=True):
    """Rank 0 is done."""


Message = Handshake | JoinAccepted | HandshakeRejected | Beat | Order | End
DECODER = msgspec.msgpack.Decoder(Message)
