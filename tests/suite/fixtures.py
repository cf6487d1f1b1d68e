"""Strict numerics for every test, models to run, and the oracle that has no cache."""

from suite import quick  # first: jax reads its settings once

# isort: split
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.invariance import BASE, PARAMS, bits, prompts
from cases.models import RANDOM
from cases.oracle import Model, continue_plainly
from fakes.greedy import greedy_programs
from jaxtyping import config
from suite import jax_patches
from suite.marks import full

from duetto import LLM
from duetto.checkpoints.huggingface import load_hf
from duetto.model.transformer import decoder_spec
from duetto.model.tree import Spec, is_spec
from duetto.model.weights.compression.compress import quantise_inputs, quantize_params
from duetto.serve.engine.speculation.controller import Controller, StepTimeTable
from duetto.serve.engine.startup import cpu_kernels, dtype, start
from duetto.serve.host.streams import warn_once
from duetto.serve.llm import loading
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline import targets
from duetto.serve.runtime.compiled import executable_cache
from duetto.serve.runtime.compiled.lowering import LocalLowering
from duetto.serve.runtime.compiled.program_table import ProgramTable
from duetto.serve.runtime.compiled.shapes import CanonicalShapes, Shape, Sizes
from duetto.serve.runtime.equal_bits.warmup import first_shapes

ROOT = Path(__file__).resolve().parents[2]
CHECKED = quick.CHECKED
GIVEN = loading.model_from_params
MOST_WEIGHTS = 256  # arrays of a model
# Rooms in which arrays flow: their tests check the shapes of every call.
TYPED = (
    "model",
    "kvcache",
    "sampling",
    "serve/runtime/steps",
    "serve/runtime/compiled",
    "serve/runtime/equal_bits",
    "serve/engine/speculation",
    "test_invariance_adapters.py",
)
# No arrays and many calls, or engines whose programs other tests trace with checks.
UNTYPED = (
    "serve/engine/speculation/test_drafters.py",
    "serve/engine/speculation/test_speculation_controller.py",
    "serve/runtime/compiled/test_executable_cache.py",
    "serve/runtime/equal_bits/test_warmup.py",
)


def pytest_report_header() -> list[str]:
    """Say which patches of jax are left out, and why."""
    return list(jax_patches.DIFFERENCES.values())


@pytest.fixture(autouse=True, scope="session")
def processes() -> None:
    quick.prepare_process()


@pytest.fixture(autouse=True, scope="session")
def plain_processor(pytestconfig: pytest.Config) -> Iterator[None]:
    """A processor that multiplies bfloat16 no faster, and whose kernels are used only where a test asks for
    them: defaults do not depend on the machine. With `--cpu-kernels` engines use them where they can."""
    own = bool(pytestconfig.getoption("--cpu-kernels"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dtype, "bfloat16_gain", lambda *_: 1.0)
        patch.setattr(cpu_kernels, "is_optimisation_off", lambda: not own)
        # no test needs exact rates
        patch.setattr(targets, "time_matmul", partial(targets.time_matmul, repeats=1))
        if own:  # also where kernels leave attention to XLA
            patch.setattr(
                cpu_kernels,
                "explain_default_without_kernels",
                lambda *a: "they are for one device" if a[-1] else "",
            )
            patch.setattr(loading, "model_from_params", given_with_kernels)
        yield


def given_with_kernels(*arguments: Any) -> loading.LoadedModel:
    """Take parameters as `LLM.from_params` does, for CPU kernels unless the options have none."""
    (*others, options) = arguments
    return partial(GIVEN, *others)({"cpu_kernels": True} | options)


@pytest.fixture(autouse=True)
def fresh_warnings() -> None:
    """Says in each test what is said once a process: no test depends on those before it."""
    warn_once.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def optimisations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles the programs of a module that is marked `as_served` as users' are, with `--as-served` of
    all."""
    if not (request.config.getoption("--as-served") or request.node.get_closest_marker("as_served")):
        yield
        return
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="module")
def shapes_checked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks annotations, shapes among them, at every call in tests of the rooms where arrays flow."""
    where = request.path.relative_to(ROOT / "tests").as_posix()
    config.update("jaxtyping_disable", not where.startswith(TYPED) or where in UNTYPED)
    yield
    config.update("jaxtyping_disable", True)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """For tests that give wrong types on purpose: they meet what the library itself says, as users do."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", before)


@pytest.fixture(autouse=True, scope="module")
def programs_shared() -> Iterator[None]:
    """Lets the engines of a process share compiled programs."""
    quick.release_programs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "ProgramTable", quick.share_programs)
        for lower, name in quick.SMALL.items():
            patch.setattr(LocalLowering, lower, quick.lower_small_once(vars(LocalLowering)[lower], name))
        yield


@pytest.fixture(scope="module")
def own_programs(programs_shared: None) -> Iterator[None]:
    """Engines read their programs from the folder: none is shared within the process."""
    with pytest.MonkeyPatch.context() as patch, greedy_programs():
        patch.setattr(start, "ProgramTable", ProgramTable)
        yield


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start cold, whatever earlier starts have kept, serve before all of their programs are there,
    and compile all of them under any load."""
    monkeypatch.setattr(start, "may_serve_early", quick.MAY_SERVE_EARLY)
    monkeypatch.setattr(executable_cache, "load_program", lambda *_: None)
    monkeypatch.setattr(ProgramTable, "_lower", quick.lower_steps_once(ProgramTable._lower))
    monkeypatch.setattr(executable_cache, "compile_and_store", lambda _, lowered, *__: lowered.compile())
    monkeypatch.setattr(executable_cache.CompileTimes, "mean", 0.0)


@contextmanager
def with_few_shapes(verifications: int | None = None, decodes: int = 1) -> Iterator[None]:
    """Engines compile one prefill, `decodes` decodes of one width and the narrowest verifications that
    compute as many tokens as the first of these, by default all: what serves every request."""
    engine_shapes = start.engine_shapes

    def few(options: EngineOptions, sizes: Sizes, layers: Any, platform: str, dtype: Any) -> list[Shape]:
        found = engine_shapes(options, sizes, layers, platform, dtype)
        first = first_shapes(found, CanonicalShapes.choose(platform, options, sizes))
        width = max(shape.area for shape in first if shape.phase == "decode")
        verify = [shape for shape in found if shape.phase == "verify" and shape.area >= width]
        alike = [shape for shape in found if shape.phase == "decode" and shape.rows == width]
        kept = {*first, *alike[:decodes]}
        return [*(shape for shape in found if shape in kept), *verify[:verifications]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "engine_shapes", few)
        yield


@pytest.fixture
def few_shapes() -> Iterator[None]:
    with with_few_shapes():
        yield


@pytest.fixture
def greedy_only() -> Iterator[None]:
    """Engines of the test serve greedy requests. A GPU's program compiles in a fifth of the
    time without its draws."""
    with greedy_programs():
        yield


@pytest.fixture
def steady_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose steps all take a millisecond: what an engine does with guesses, which cost nothing
    there, does not depend on the machine."""
    learn, record = StepTimeTable.learn, Controller.record_speculative
    monkeypatch.setattr(StepTimeTable, "seconds_for", lambda self, key: 1e-3)
    monkeypatch.setattr(StepTimeTable, "learn", lambda self, key, _: learn(self, key, 1e-3))
    monkeypatch.setattr(
        Controller, "record_speculative", lambda self, g, n, s, p: record(self, g, n, 1e-3, p)
    )


@partial(jax.jit, static_argnums=1)
def normals(key_data: jax.Array, count: int) -> jax.Array:
    return jax.random.normal(jax.random.wrap_key_data(key_data), (count,))


def random_model(name: str) -> Model:
    """Random, with weights large enough that greedy tokens have clear margins. All models share the programs
    that draw them, one for each of few sizes: one for all weights takes seconds to compile."""
    specs, structure = jax.tree.flatten(decoder_spec(RANDOM[name]), is_leaf=is_spec)
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), MOST_WEIGHTS)))

    def drawn(spec: Spec, key: np.ndarray) -> jax.Array:
        size = math.prod(spec.shape)
        numbers = np.asarray(normals(key, max(64, 4 ** math.ceil(math.log(size, 4)))))[:size]
        scale = 0.3 if spec.mean == 0 else spec.scale
        weights = np.float32(spec.mean) + np.float32(scale) * numbers.reshape(spec.shape)
        return jax.device_put(weights.astype(spec.dtype or np.float32))

    assert len(specs) <= MOST_WEIGHTS
    return Model(name, RANDOM[name], jax.tree.unflatten(structure, list(map(drawn, specs, keys))))


OTHERWISE = {  # parameters of the model "tiny", kept in another way
    "bfloat16": lambda params: jax.tree.map(lambda x: x.astype(jnp.bfloat16), params),
    "int8": lambda params: quantize_params(params, "int8"),
    "int8 activations": lambda params: quantise_inputs(quantize_params(params, "int8"), "int8"),
    "int4, int8 activations": lambda params: quantise_inputs(quantize_params(params, "int4"), "int8"),
}
EXPERTS_IN_CODES = "windows, int8 activations"  # a model with experts, kept as "int8 activations"
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
    if name == EXPERTS_IN_CODES:
        whole = random_model(name.partition(",")[0])
        return Model(name, whole.config, jax.jit(OTHERWISE["int8 activations"])(whole.params))
    if name in CACHES:
        return replace(make_model(name.partition(",")[0]), name=name, kv_cache_dtype=CACHES[name])
    if name in RANDOM:
        return random_model(name)
    if name in OTHERWISE | RARELY:
        whole, kept = random_model("tiny"), (OTHERWISE | RARELY)[name]
        return Model(name, whole.config, jax.jit(kept)(whole.params))
    assert name == "demo"
    return Model(name, *load_hf(ROOT / "checkpoints" / "demo", jnp.float32))


IN_EIGHT_BITS = "windows, int8 cache", EXPERTS_IN_CODES
# Models that differ in kind: float32, a cache in eight bits with windows, latent rows, states, bfloat16.
OF_EACH_KIND = "tiny", "windows, int8 cache", "latent", "recurrent", "bfloat16"


def mark_models(names: Iterable[str]) -> list[Any]:
    """Return models as cases of a test: those that are not OF_EACH_KIND are repetitions."""
    return [name if name in OF_EACH_KIND else full(name) for name in names]


@pytest.fixture(scope="session", params=mark_models([*RANDOM, *OTHERWISE, *IN_EIGHT_BITS, "demo"]))
def model(request: pytest.FixtureRequest) -> Model:
    return make_model(request.param)


@pytest.fixture(scope="session")
def tiny() -> Model:
    return random_model("tiny")


@pytest.fixture(scope="session")
def one_layer(tiny: Model) -> Model:
    """The model "tiny" cut to its first layer, for engines whose tests are not of the model."""
    config = replace(tiny.config, layers=tiny.config.layers[:1])
    return replace(tiny, config=config, params=replace(tiny.params, layers=tiny.params.layers[:1]))


Oracle = Callable[..., list[int]]  # of a prompt, its parameters, and what continue_plainly takes more


@pytest.fixture(scope="session")
def oracle() -> Callable[[Model], Oracle]:
    """A model's own continuation by the plainest means: the whole text forward for every token."""
    return lambda model: partial(continue_plainly, model)


# ---------------------------------------------------------------- the invariance suite

# Of these another engine takes several steps of decode in a call: `FEWER` of test_invariance.py.
ONE_STEP = (
    "windows", "longrope", "parallel", "recurrent", "borrowed", "bfloat16", "windows, int8 cache", "latent",
    "distances",
)  # fmt: skip


def activations_of(model: Model) -> str | None:
    """The option of an engine that serves a model's parameters."""
    return "int8" if model.name.endswith("int8 activations") else None


@pytest.fixture(scope="module")
def serve(model, pytestconfig):
    """Starts an engine; the programs of the demo model are compiled as users' are."""
    as_served = model.name == "demo" or pytestconfig.getoption("--as-served")
    jax.config.update("jax_disable_most_optimizations", not as_served)
    own = BASE | {"kv_cache_dtype": model.kv_cache_dtype, "activations": activations_of(model)}
    if model.name in ONE_STEP:
        own["decode_steps"] = 1
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
        base.engine.tables.reset_prefix_cache()
        outputs += [bits(o) for o in base.generate(prompt, params, use_tqdm=False)]
    return outputs
