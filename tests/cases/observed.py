"""Inner values of the tokens of texts, by the plainest means: each text forward, at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from cases.embeddings import WIDTH, padded

from duetto import RequestOutput
from duetto.model.attention import causal
from duetto.model.transformer import ObserveOptions, Recorder, forward

LAYERS = (0, 1, 3)
OPTIONS = {"hidden_state_layers": LAYERS, "enable_return_routed_experts": True, "decode_steps": 1}


def observed(output: RequestOutput) -> tuple[bytes, bytes]:
    """The bits of a request's hidden states, and its experts."""
    completion, tokens = output.outputs[0], len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    assert len(completion.hidden_states) == len(completion.routed_experts) == tokens - 1
    return completion.hidden_states.tobytes(), completion.routed_experts.tobytes()


def observed_plainly(params, config, text: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states [tokens,layers,D] and experts [tokens,layers,A] of a text."""
    found = values(params, config, *padded(text))
    return np.asarray(found.hidden)[0, : len(text)], np.asarray(found.experts)[0, : len(text)]


@partial(jax.jit, static_argnames="config")
def values(params, config, tokens, length):
    recorder = Recorder(ObserveOptions(experts=True, layers=LAYERS))
    places = jnp.arange(WIDTH, dtype=jnp.int32)[None]
    forward(params, config, tokens, places, causal, None, length, recorder)
    return recorder.collect()
