"""A head that guesses a decoder's coming tokens from its last hidden state, without running it again.

It stands under the decoder's own output embedding, as Medusa's heads do (Cai et al., arXiv 2401.10774), and
is told the newest token, as Hydra's are (Ankner et al., arXiv 2402.05109). One block does for every place: it
goes on from the state that it made (the recurrent drafter, Zhang et al., arXiv 2403.09919), so that one file
serves any number of guesses.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .config import NormKind
from .layers import einsum, rms_norm
from .transformer import Decoder
from .tree import Spec, pytree


@pytree
class Head:
    """Projections of the hidden state, of the newest token's embedding, and of both to the next state."""

    hidden: Any  # [D,F]
    token: Any  # [D,F]
    out: Any  # [F,D]


def head_spec(D: int, F: int) -> Head:
    """The parameters of a head with F inner units for hidden states of size D."""
    return Head(
        hidden=Spec((D, F), ("model", "ffn"), scale=D**-0.5),
        token=Spec((D, F), ("model", "ffn"), scale=D**-0.5),
        out=Spec((F, D), ("ffn", "model")),
    )


def advance(
    head: Head, params: Decoder, state: Float[Array, "*rows D"], token: Int[Array, "*rows"]
) -> Float[Array, "*rows D"]:
    """The state after one more token: first that of the decoder's last norm and the token sampled from it,
    then the state that the head made and its guess. `unembed` makes it logits of the token that follows."""
    embedded = params.embed[token].astype(state.dtype)
    embedded = rms_norm(embedded, jnp.ones(embedded.shape[-1], state.dtype), NormKind())
    inner = einsum("...d,df->...f", state, head.hidden) + einsum("...d,df->...f", embedded, head.token)
    return einsum("...f,fd->...d", jax.nn.silu(inner), head.out)
