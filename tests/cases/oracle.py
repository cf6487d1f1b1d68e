"""The oracle: a model's own continuation by the plainest means, the whole text forward for every token."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from cases.programs import StoredJit
from cases.sampling import admit_jit, load_jit

from duetto import SamplingParams
from duetto.kvcache.quantised import SCHEMES, QuantisedPool, round_to_pool
from duetto.model.attention import causal
from duetto.model.config import ModelConfig
from duetto.model.transformer import Decoder, compute_logits, forward
from duetto.sampling.custom_processors import LogitsProcessor, trace_processors
from duetto.sampling.params import fold_seed, request_knobs
from duetto.sampling.sample import sample
from duetto.sampling.state import dense_bias, empty_sampling_state, needs_history, record_tokens
from duetto.serve.host import identity
from duetto.serve.host.blob_store import BlobStore
from duetto.serve.runtime.compiled import executable_cache

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(jax.config.values["jax_compilation_cache_dir"]) / "oracle"


@dataclass(frozen=True)
class Model:
    """Parameters to serve in tests, under the name that the test report shows, and how their keys are
    kept."""

    name: str
    config: ModelConfig
    params: Decoder
    kv_cache_dtype: str = "auto"


def continue_plainly(
    model: Model,
    prompt: list[int],
    params: SamplingParams,
    processors: Sequence[Callable] = (),
    guess: Sequence[int] = (),
) -> list[int]:
    """The tokens after a prompt; found on disk where the same sources have computed them before.

    A right guess saves passes; no guess changes a token."""
    own = traced(tuple(processors), model.config.vocab_size, width_of(prompt, params))
    asked = (prompt, params, *own)
    key = executable_cache.combine_keys([weights_hash(model)], sources(), *asked, here())
    blobs = BlobStore(KEPT, executable_cache.PROGRAM_FORMAT, 1 << 32) if key and KEPT.is_dir() else None
    if key and blobs:
        with suppress(OSError):  # most often there is none
            if content := blobs.read(key):
                return json.loads(content)
    tokens = computed(model, prompt, params, own, guess)
    if key and blobs:
        blobs.write(key, json.dumps(tokens).encode())
    return tokens


traced = cache(trace_processors)  # a trace and a probe take two programs for each


def here() -> str:
    """What decides the oracle's tokens besides; not how many devices a processor shows."""
    facts = identity.gather_facts("program", jax.devices()[0])
    found = repr({name: fact for name, fact in facts.items() if name != "traced source"})
    return re.sub(r"--xla_force_host_platform_device_count=\d+ ?", "", found)


@cache
def sources() -> str:
    """A hash of the code that the oracle's tokens follow from."""
    folders = [ROOT / name for name in ("model", "sampling", "kvcache")]
    return identity.hash_sources([*folders, Path(__file__).parent])


HASHES: dict[int, tuple[Decoder, str]] = {}


def weights_hash(model: Model) -> str:
    """A hash of a model's parameters and of how its keys are kept."""
    if id(model.params) not in HASHES:
        found = hashlib.sha256(repr((model.config, model.kv_cache_dtype)).encode())
        for leaf in jax.tree.leaves(model.params):
            found.update(np.asarray(leaf).tobytes())
        HASHES[id(model.params)] = model.params, found.hexdigest()
    return HASHES[id(model.params)][1] + model.kv_cache_dtype


def width_of(prompt: list[int], params: SamplingParams) -> int:
    """Tokens of a pass, whose time is the square of it."""
    return 256 if len(prompt) + (params.max_tokens or 16) <= 256 else 512


def computed(
    model: Model,
    prompt: list[int],
    params: SamplingParams,
    own: tuple[LogitsProcessor, ...] = (),
    guess: Sequence[int] = (),
) -> list[int]:
    """The same by the model, in one program."""
    V, wanted, width = model.config.vocab_size, params.max_tokens or 16, width_of(prompt, params)
    given = {"seed": fold_seed(params.seed or 0), "stop_ids": (), "prompt_len": len(prompt)}
    state = admit_jit(
        empty_sampling_state(1, V, processors=own, S=width if own else 0),
        np.int32(0),
        request_knobs(params, **given, processors=own),
    )
    if needs_history(params, own):
        padded = np.resize(np.array(prompt, np.int32), width)
        lengths = np.int32(len(prompt)), np.int32(len(prompt))
        state = load_jit(state, np.int32(0), padded, *lengths, dense_bias(params, V))
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(prompt)] = prompt
    tokens[0, len(prompt) : len(prompt) + len(guess)] = guess
    ends = np.int32(len(prompt)), np.int32(len(prompt) + wanted)
    found = all_tokens(model.params, model.config, tokens, *ends, state, model.kv_cache_dtype)
    return np.asarray(found)[0, len(prompt) : len(prompt) + wanted].tolist()


@partial(jax.jit, static_argnames=("config", "kv_cache_dtype"))
def all_tokens(params, config, tokens, begin, end, state, kv_cache_dtype):
    """The row with its tokens from `begin` to `end` written. What stands there is a guess.

    The whole text goes forward again behind each token that was not guessed, and behind every token if a
    length changes frequencies (`Rope.boundary`)."""
    is_dated = any(
        kind.mixer.rope.longrope_boundary for kind in config.layers if getattr(kind.mixer, "rope", None)
    )

    def is_left(carry):
        return carry[0] < end

    def passed(carry):
        at, tokens, state = carry
        hidden = whole(params, config, tokens, at[None], kv_cache_dtype)

        def goes_on(carry):
            i, _, _, is_known = carry
            return is_known & (i < end)

        def another(carry):
            i, tokens, state, _ = carry
            token, state = drawn(params, config, hidden, i[None], state)
            is_known = (token[0] == tokens[0, i]) & (not is_dated)
            return i + 1, jax.lax.dynamic_update_slice(tokens, token[None], (0, i)), state, is_known

        return jax.lax.while_loop(goes_on, another, (at, tokens, state, True))[:3]

    return jax.lax.while_loop(is_left, passed, (begin, jnp.asarray(tokens), state))[1]


def causal_as_kept(kv_cache_dtype, state, layer, q, k, v, reading):
    """The attention without a cache, over keys and values as one in eight bits would give them back."""
    pool = QuantisedPool(None, None, SCHEMES[kv_cache_dtype].name)
    k, v = (None if x is None else round_to_pool(pool, x) for x in (k, v))
    return causal(state, layer, q, k, v, reading)


@partial(StoredJit, static_argnames=("config", "kv_cache_dtype"))
def next_token(params, config, tokens, position, state, kv_cache_dtype="auto"):
    return drawn(params, config, whole(params, config, tokens, position, kv_cache_dtype), position, state)


def whole(params, config, tokens, length, kv_cache_dtype):
    """Hidden states of a text that is taken to have a length."""
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    attend = causal if kv_cache_dtype == "auto" else partial(causal_as_kept, kv_cache_dtype)
    return forward(params, config, tokens, places, attend, None, length)[0]


def drawn(params, config, hidden, position, state):
    """The token at a position, and the state behind it."""
    logits = compute_logits(params, config, hidden[jnp.arange(1), position - 1])
    zero, yes = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
    token = sample(logits, position, zero, yes, state).token
    return token, record_tokens(state, zero, token, yes)
