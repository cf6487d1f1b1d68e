"""A head that drafts a decoder's next tokens from its last hidden state, without running the decoder again.

The head precedes the decoder's own output embedding, as Medusa's heads do (Cai et al., arXiv 2401.10774). It
also reads the newest token, as Hydra's do (Ankner et al., arXiv 2402.05109). One block serves every draft
position: it continues from the state that it made (the recurrent drafter, Zhang et al., arXiv 2403.09919). So
one file serves any number of drafts.
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
class DraftHead:
    """Projections of the hidden state, of the newest token's embedding, and of both to the next state."""

    hidden: Any  # [D,F]
    token: Any  # [D,F]
    out: Any  # [F,D]


def draft_head_spec(D: int, F: int) -> DraftHead:
    """Return the specs of a head with F inner units for hidden states of size D."""
    return DraftHead(
        hidden=Spec((D, F), ("model", "ffn"), scale=D**-0.5),
        token=Spec((D, F), ("model", "ffn"), scale=D**-0.5),
        out=Spec((F, D), ("ffn", "model")),
    )


def advance_draft_state(
    head: DraftHead, params: Decoder, state: Float[Array, "*rows D"], token: Int[Array, "*rows"]
) -> Float[Array, "*rows D"]:
    """Advance the draft state by one token. `compute_logits` turns the result into logits of the token that
    follows.

    The first state is the decoder's last normed hidden state, and the first token the one sampled from it.
    Each later call takes the returned state and the token drafted from it.
    """
    embedded = params.embed[token].astype(state.dtype)
    embedded = rms_norm(embedded, jnp.ones(embedded.shape[-1], state.dtype), NormKind())
    inner = einsum("...d,df->...f", state, head.hidden) + einsum("...d,df->...f", embedded, head.token)
    return einsum("...f,fd->...d", jax.nn.silu(inner), head.out)
