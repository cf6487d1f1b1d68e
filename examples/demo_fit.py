"""The training loop of the demo models: AdamW over packed windows, resumable at any checkpoint, same numbers
each run."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_corpus import batches, blocks

from duetto.model.attention import causal
from duetto.model.config import ModelConfig
from duetto.model.transformer import Decoder, compute_logits, decoder_spec, forward
from duetto.model.tree import init_params


@dataclass(frozen=True)
class Phase:
    """A number of steps at one batch shape."""

    steps: int
    batch: int
    context: int


@dataclass(frozen=True)
class Recipe:
    """Everything that a run depends on except the corpus."""

    config: ModelConfig
    phases: tuple[Phase, ...]
    learning_rate: float
    warmup: int = 200
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 250

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def schedule(self) -> optax.Schedule:
        """Warm-up, a plateau, and a straight line to zero over the last three tenths (arXiv 2405.18392)."""
        peak, fall = self.learning_rate, self.steps * 3 // 10
        warmup = min(self.warmup, self.steps // 10)
        rise = optax.linear_schedule(0.0, peak, warmup)
        return optax.join_schedules(
            [rise, optax.linear_schedule(peak, 0.0, fall, self.steps - fall - warmup)], [warmup]
        )

    def optimizer(self) -> optax.GradientTransformation:
        """Muon (Jordan et al., 2024) for the layers' matrices, with updates as large as AdamW's (arXiv
        2502.16982).

        AdamW (Loshchilov and Hutter, arXiv 1711.05101) takes the embedding and the gains of norms; gains do
        not decay.
        """
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.contrib.muon(
                self.schedule(),
                weight_decay=self.weight_decay,
                adam_b2=0.98,
                consistent_rms=0.2,
                muon_weight_dimension_numbers=matrices,
            ),
        )


def matrices(tree: Any) -> Any:
    """Return the axes of a leaf that a product sums over and those that it yields; None for the embedding,
    gains and biases."""
    from optax.contrib import MuonDimensionNumbers as Axes

    def axes(path: tuple, leaf: Any) -> Any:
        name = path[-1].name
        if name == "embed" or leaf.ndim < 2:
            return None
        if leaf.ndim == 2:
            return Axes(0, 1)
        return Axes((0, 1), 2) if name == "o" else Axes(0, (1, 2))

    return jax.tree_util.tree_map_with_path(axes, tree)


@dataclass(frozen=True)
class Teacher:
    """A model whose distribution is learned (Hinton et al., arXiv 1503.02531).

    weight: share of its distribution in the loss; the rest is the corpus's own tokens.
    """

    config: ModelConfig
    params: Decoder
    weight: float = 0.8


@dataclass(frozen=True)
class Material:
    """Training data: a stream of tokens, and for a draft model its teacher."""

    stream: np.ndarray
    teacher: Teacher | None = None


def logits(params: Decoder, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Next-token logits of every position, float32 [B,T,V], by the forward pass that the engine serves."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = forward(params, config, tokens, positions, causal)
    return compute_logits(params, config, hidden)


def cross_entropy(params: Decoder, config: ModelConfig, window: jax.Array) -> jax.Array:
    """Mean nats per token of a window [B,T+1]."""
    scores = logits(params, config, window[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, window[:, 1:]).mean()


def distillation(params: Decoder, config: ModelConfig, teacher: Teacher, window: jax.Array) -> jax.Array:
    """Cross entropy with the teacher's distribution (KL up to a constant) and with the next token, mixed."""
    scores = logits(params, config, window[:, :-1])
    guide = jax.nn.softmax(logits(teacher.params, teacher.config, window[:, :-1]))
    soft = optax.softmax_cross_entropy(scores, guide).mean()
    hard = optax.softmax_cross_entropy_with_integer_labels(scores, window[:, 1:]).mean()
    return teacher.weight * soft + (1 - teacher.weight) * hard


def make_step(recipe: Recipe, teacher: Teacher | None) -> Callable:
    """`step(state, window, guide) -> state, loss`, jitted with the state donated; `guide` is the teacher's
    parameters or None."""
    optimizer = recipe.optimizer()

    def loss(params: Decoder, guide: Decoder | None, window: jax.Array) -> jax.Array:
        if teacher is None or guide is None:
            return cross_entropy(params, recipe.config, window)
        return distillation(params, recipe.config, Teacher(teacher.config, guide, teacher.weight), window)

    @partial(jax.jit, donate_argnums=0)
    def step(state: tuple, window: jax.Array, guide: Decoder | None) -> tuple:
        params, moments = state
        value, gradient = jax.value_and_grad(loss)(params, guide, window)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def start(recipe: Recipe, params: Any) -> tuple:
    """Parameters, random unless given, and optimizer moments before the first step, which may destroy
    them."""
    if params is None:
        params = init_params(jax.random.key(recipe.seed), decoder_spec(recipe.config))
    params = jax.tree.map(jnp.copy, params)
    return params, recipe.optimizer().init(params)


def windows(recipe: Recipe, stream: np.ndarray, done: int) -> Iterator[np.ndarray]:
    """The batches of steps done, done+1, ... through all phases."""
    for number, phase in enumerate(recipe.phases):
        skip = min(done, phase.steps)
        done -= skip
        source = batches(stream, (phase.batch, phase.context), recipe.seed + 1000 * (number + 1), skip)
        for _ in range(phase.steps - skip):
            yield next(source)


def evaluate(params: Decoder, config: ModelConfig, stream: np.ndarray, T: int, limit: int) -> float:
    """Mean nats per token over at most `limit` tokens spread over the stream, read in windows of T."""
    rows = blocks(stream, T)
    rows = rows[:: max(1, len(rows) * T // limit)]
    measure = jax.jit(cross_entropy, static_argnums=1)
    return float(np.mean([measure(params, config, row[None]) for row in rows]))


def fit(
    recipe: Recipe,
    material: Material,
    work: Path,
    report: Callable[[int, Decoder], dict[str, float]],
    params: Decoder | None = None,
) -> Decoder:
    """Train `params`, or random ones, to the last step; from the newest checkpoint in `work` if there is one.

    Every `evaluate_every` steps `report(step, params)` returns figures; these, the mean training loss and the
    state are stored in `work` (`history.jsonl`, and an Orbax folder).
    """
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(work.absolute() / "state", options=options) as manager:
        state, done = start(recipe, params), manager.latest_step() or 0
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
        step = make_step(recipe, material.teacher)
        losses = []
        clock = time.perf_counter()
        guide = None if material.teacher is None else material.teacher.params
        for number, window in enumerate(windows(recipe, material.stream, done), done + 1):
            state, loss = step(state, window, guide)
            losses.append(loss)
            if number % recipe.evaluate_every == 0 or number == recipe.steps:
                figures = {"step": number, "train": float(np.mean(losses)), **report(number, state[0])}
                figures["seconds"] = time.perf_counter() - clock
                losses = []
                clock = time.perf_counter()
                manager.save(number, args=ocp.args.StandardSave(state))
                record(work / "history.jsonl", figures)
    return state[0]


def record(path: Path, figures: dict) -> None:
    """One line of the history; a resumed run repeats no line, since it resumes where the last line was
    written."""
    print(" ".join(f"{k} {v:.4g}" for k, v in figures.items()), flush=True)
    with path.open("a", encoding="utf-8") as f:
        f.write(json.dumps(figures) + "\n")
