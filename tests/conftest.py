"""Strict numerics for every test, models to run, and the oracle that has no cache."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
XLA_CACHE = ROOT / ".pytest_cache" / "xla"
# For the tests' subprocesses too: the same small programs are compiled again and again otherwise.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(XLA_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Most of the suite's time was LLVM's: only tests of bits and of compiled programs ask for it
# (`optimisations`).
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config, install_import_hook

# Annotations of these packages are checked at every call, shapes among them; users' runs do not pay for it.
CHECKED = ("model", "kvcache", "sampling", "serve.programs", "serve.speculation")
install_import_hook([f"duetto.{name}" for name in CHECKED], "annotations.check")

from cases.invariance import BASE, PARAMS, bits, prompts
from cases.models import RANDOM

from duetto import LLM, SamplingParams
from duetto.checkpoints.huggingface import load
from duetto.kvcache.quantised import SCHEMES, QuantisedPool, read_back
from duetto.model.attention import causal
from duetto.model.config import ModelConfig
from duetto.model.transformer import Decoder, decoder_spec, forward, unembed
from duetto.model.tree import init
from duetto.model.weights.compress import quantize_params
from duetto.sampling.params import fold_seed, knobs_row
from duetto.sampling.sample import sample
from duetto.sampling.state import admit, commit, dense_bias, empty_state, load_history, needs_history
from duetto.serve.loading import dtype, start
from duetto.serve.programs import kept
from duetto.serve.speculation.controller import Controller, Times

MAY_SERVE_EARLY = start.may_serve_early
# Which programs serve a test is to follow from the test: `early` has engines that serve while they compile.
start.may_serve_early = lambda *_: False

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# The emitters before today's compile a step in half the time, and so small a program gains nothing from two
# threads.
OLDER = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
COMPILER: Any = import_module("jax._src.compiler")  # nothing public reaches a jitted function's options
OPTIONS = COMPILER.get_compile_options


def quick_options(*arguments: Any, env_options_overrides: dict[str, Any] | None = None, **others: Any) -> Any:
    """Options to compile with the older emitters, unless a program is to be as users' are."""
    quickly = OLDER if jax.config.values["jax_disable_most_optimizations"] else None
    return OPTIONS(*arguments, env_options_overrides=env_options_overrides or quickly, **others)


with suppress(jax.errors.JaxRuntimeError):  # newer versions have one kind only
    jax.jit(lambda: 0).lower().compile(OLDER)
    COMPILER.get_compile_options = quick_options


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that take minutes run where `-m` asks for them."""
    if "minutes" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("minutes")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture(autouse=True, scope="session")
def processes() -> None:
    """Those that tests start compile quickly too; this one has read its flags by now."""
    if jax.devices() and COMPILER.get_compile_options is quick_options:
        os.environ.setdefault("XLA_FLAGS", " ".join(f"--{name}={int(x)}" for name, x in OLDER.items()))


@pytest.fixture(autouse=True, scope="session")
def plain_processor() -> Iterator[None]:
    """A processor that multiplies bfloat16 no faster: what "auto" chooses does not depend on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dtype, "bfloat16_gain", lambda *_: 1.0)
        yield


@pytest.fixture(autouse=True, scope="module")
def optimisations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles the programs of a module that is marked `as_served` as users' are."""
    if request.node.get_closest_marker("as_served") is None:
        yield
        return
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """For tests that give wrong types on purpose: they meet what the library itself says, as users do."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start cold, whatever earlier starts have kept, and serve before all of their programs are
    there."""
    monkeypatch.setattr(start, "may_serve_early", MAY_SERVE_EARLY)
    monkeypatch.setattr(kept, "load", lambda *_: None)


@pytest.fixture
def steady_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose steps all take a millisecond: what an engine does with guesses, which cost nothing
    there, does not depend on the machine."""
    learn, verified = Times.learn, Controller.verified
    monkeypatch.setattr(Times, "of", lambda self, key: 1e-3)
    monkeypatch.setattr(Times, "learn", lambda self, key, _: learn(self, key, 1e-3))
    monkeypatch.setattr(Controller, "verified", lambda self, g, n, s: verified(self, g, n, s and 1e-3))


@dataclass(frozen=True)
class Model:
    """Parameters to serve in tests, under the name that the test report shows, and how their keys are
    kept."""

    name: str
    config: ModelConfig
    params: Decoder
    kv_cache_dtype: str = "auto"


def random_model(name: str) -> Model:
    """Random, with weights large enough that greedy tokens have clear margins."""
    spec = jax.tree.map(
        lambda s: replace(s, scale=0.3) if s.mean == 0 else s,
        decoder_spec(RANDOM[name]),
        is_leaf=lambda x: hasattr(x, "axes"),
    )
    return Model(name, RANDOM[name], jax.jit(lambda key: init(key, spec))(jax.random.key(1)))


OTHERWISE = {  # parameters of the model "tiny", kept in another way
    "bfloat16": lambda params: jax.tree.map(lambda x: x.astype(jnp.bfloat16), params),
    "int8": lambda params: quantize_params(params, "int8"),
}
RARELY = {  # in tests that ask for them by name
    "int4": lambda params: quantize_params(params, "int4"),
    "fp8": lambda params: quantize_params(params, "fp8"),
}
CACHES = {  # others with caches in eight bits
    "windows, int8 cache": "int8",
    "latent, fp8_e5m2 cache": "fp8_e5m2",
    "bfloat16, fp8_e4m3 cache": "fp8_e4m3",
}


def make_model(name: str) -> Model:
    if name in CACHES:
        return replace(make_model(name.partition(",")[0]), name=name, kv_cache_dtype=CACHES[name])
    if name in RANDOM:
        return random_model(name)
    if name in OTHERWISE | RARELY:
        whole, kept = random_model("tiny"), (OTHERWISE | RARELY)[name]
        return Model(name, whole.config, jax.jit(kept)(whole.params))
    assert name == "demo"
    return Model(name, *load(ROOT / "checkpoints" / "demo", jnp.float32))


@pytest.fixture(scope="session", params=[*RANDOM, *OTHERWISE, "windows, int8 cache", "demo"])
def model(request: pytest.FixtureRequest) -> Model:
    return make_model(request.param)


@pytest.fixture(scope="session")
def tiny() -> Model:
    return random_model("tiny")


Oracle = Callable[[list[int], SamplingParams], list[int]]


@pytest.fixture(scope="session")
def oracle() -> Callable[[Model], Oracle]:
    """A model's own continuation by the plainest means: the whole text forward for every token."""
    return lambda model: partial(continue_plainly, model)


def continue_plainly(model: Model, prompt: list[int], params: SamplingParams) -> list[int]:
    tokens, V, wanted = list(prompt), model.config.vocab_size, params.max_tokens or 16
    width = 256 if len(prompt) + wanted <= 256 else 512  # the time of a pass is the square of it
    state = admit(
        empty_state(1, V),
        jnp.int32(0),
        knobs_row(params, seed=fold_seed(params.seed or 0), stop_ids=(), prompt_len=len(prompt)),
    )
    if needs_history(params):
        padded = jnp.asarray(np.resize(np.array(prompt, np.int32), width))
        lengths = jnp.int32(len(prompt)), jnp.int32(len(prompt))
        state = load_history(state, jnp.int32(0), padded, *lengths, jnp.asarray(dense_bias(params, V)))
    for _ in range(wanted):
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(tokens)] = tokens
        position = jnp.full(1, len(tokens), jnp.int32)
        args = jnp.asarray(padded), position, state, model.kv_cache_dtype
        token, state = next_token(model.params, model.config, *args)
        tokens.append(int(token[0]))
    return tokens[len(prompt) :]


def causal_as_kept(kv_cache_dtype, state, layer, q, k, v, reading):
    """The attention without a cache, over keys and values as one in eight bits would give them back."""
    pool = QuantisedPool(None, None, SCHEMES[kv_cache_dtype].name)
    k, v = (None if x is None else read_back(pool, x) for x in (k, v))
    return causal(state, layer, q, k, v, reading)


@partial(jax.jit, static_argnames=("config", "kv_cache_dtype"))
def next_token(params, config, tokens, position, state, kv_cache_dtype="auto"):
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    attend = causal if kv_cache_dtype == "auto" else partial(causal_as_kept, kv_cache_dtype)
    hidden, _ = forward(params, config, tokens, places, attend, None, position)
    logits = unembed(params, config, hidden[jnp.arange(1), position - 1])
    zero, yes = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
    token = sample(logits, position, zero, yes, state).token
    return token, commit(state, zero, token, yes)


# ---------------------------------------------------------------- the invariance suite


@pytest.fixture(scope="module")
def serve(model):
    """Starts an engine; the programs of the demo model are compiled as users' are."""
    jax.config.update("jax_disable_most_optimizations", model.name != "demo")
    own = BASE | {"kv_cache_dtype": model.kv_cache_dtype}
    yield lambda **options: LLM.from_params(model.config, model.params, **(own | options))
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def base(serve):
    with serve() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(base, model):
    """Each request served alone by an engine that has seen nothing before."""
    outputs = []
    for prompt, params in zip(prompts(model.config.vocab_size), PARAMS, strict=True):
        base.engine.tables.forget()
        outputs += [bits(o) for o in base.generate(prompt, params, use_tqdm=False)]
    return outputs
