"""Log-probabilities of given tokens with the bits of the sampler, for a trainer that differentiates them."""

from .graft import graft
from .logprobs import token_logprobs

__all__ = ["graft", "token_logprobs"]
