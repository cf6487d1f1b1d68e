"""Train the two models that ship, each from random weights, on this interpreter's standard library.

    python examples/train_demo.py --out checkpoints/demo
    python examples/train_demo.py --out checkpoints/demo-draft --teacher checkpoints/demo

The second is a draft model of a tenth of the size, distilled from the first. `--start` continues from a
finished folder instead of random weights. A run depends on the standard library, the seed, the number of
steps and its first weights, never on the clock; killed and started again, it resumes. Two idle cores take
about forty minutes for the first and ten for the second. The card's chart needs matplotlib (`pip install
duetto[notebook]`).
"""

import argparse
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from demo_card import read_history, write_card
from demo_corpus import Corpus, cut_spaces, encode, standard_library, train_tokenizer
from demo_fit import Material, Phase, Recipe, Teacher, evaluate, fit
from demo_folder import rounded, write_folder
from tokenizers import Tokenizer

from duetto.checkpoints.huggingface import load_hf
from duetto.model.config import ModelConfig
from duetto.model.transformer import Decoder

VOCABULARY = 2048
CONTEXT = 1024
STEPS, DRAFT_STEPS = 2200, 500
SECOND = 0.75  # share of the second run's end in the weights that are kept
CUT = 0.02  # share of words cut from the space before them


def phases(steps: int) -> tuple[Phase, ...]:
    """Return the phases of a run: three quarters of the steps read windows of 128 tokens, because these are
    fast, a fifth 256 tokens, and the last ones 1024."""
    middle, long = steps // 5, steps // 20
    short = Phase(steps - middle - long, batch=16, context=128)
    return short, Phase(middle, batch=8, context=256), Phase(long, batch=2, context=CONTEXT)


def longer(recipe: Recipe) -> Recipe:
    """Return the recipe of a second, short run from the end of the first, which trains on contexts of more
    than 256 tokens."""
    steps = recipe.steps
    stretch = Phase(steps // 20, batch=4, context=512), Phase(steps // 15, batch=2, context=CONTEXT)
    return replace(recipe, phases=stretch, learning_rate=recipe.learning_rate / 2, evaluate_every=50)


def mean(first: Decoder, second: Decoder) -> Decoder:
    """Return the weighted mean of both runs' last weights (Wortsman et al., arXiv 2203.05482): the second run
    is better at long contexts, and slightly worse at short ones."""
    return jax.tree.map(lambda a, b: (1 - SECOND) * a + SECOND * b, first, second)


def demo_recipe(steps: int, seed: int) -> Recipe:
    """2.4 M parameters."""
    config = ModelConfig.uniform(
        vocab_size=VOCABULARY,
        hidden_size=192,
        ffn_size=512,
        num_layers=5,
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        max_position=CONTEXT,
        tied_embeddings=True,
    )
    return Recipe(config, phases(steps), learning_rate=3e-3, seed=seed)


def draft_recipe(steps: int, seed: int) -> Recipe:
    """0.23 M parameters, more than half of them the embedding."""
    config = ModelConfig.uniform(
        vocab_size=VOCABULARY,
        hidden_size=64,
        ffn_size=192,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        max_position=CONTEXT,
        tied_embeddings=True,
    )
    return Recipe(config, phases(steps), learning_rate=5e-3, weight_decay=0.01, seed=seed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the Hugging Face folder to write")
    parser.add_argument("--teacher", type=Path, help="a finished folder: train its draft, with its tokenizer")
    parser.add_argument("--start", type=Path, help="a finished folder of the same shape to go on from")
    parser.add_argument("--work", type=Path, help="checkpoints and history (default: build/<name of OUT>)")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}, or {DRAFT_STEPS} for a draft")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def recipe_and_material(args: argparse.Namespace, corpus: Corpus) -> tuple[Recipe, Material, Tokenizer]:
    texts, teacher = list(corpus.train.values()), None
    if args.teacher:
        tokenizer = Tokenizer.from_file(str(args.teacher / "tokenizer.json"))
        recipe = draft_recipe(args.steps or DRAFT_STEPS, args.seed)
        teacher = Teacher(*load_hf(args.teacher, jnp.float32))
    else:
        tokenizer = train_tokenizer(texts, VOCABULARY)
        recipe = demo_recipe(args.steps or STEPS, args.seed)
    stream = cut_spaces(encode(tokenizer, texts), tokenizer, CUT, args.seed)
    return recipe, Material(stream, teacher), tokenizer


def main() -> None:
    args, corpus = arguments(), standard_library()
    first, material, tokenizer = recipe_and_material(args, corpus)
    held_out = encode(tokenizer, list(corpus.validation.values()))

    def report(step: int, params: Decoder) -> dict[str, float]:
        kept = rounded(params)
        write_folder(args.out, first.config, kept, tokenizer)
        spans = ("validation", 256), ("validation_long", CONTEXT)
        return {name: evaluate(kept, first.config, held_out, T, limit=40_000) for name, T in spans}

    runs = (first, longer(first))
    folder = args.work or Path("build") / args.out.name
    params, ends = load_hf(args.start, jnp.float32)[1] if args.start else None, []
    for recipe, work in zip(runs, (folder / "first", folder / "longer"), strict=True):
        work.mkdir(parents=True, exist_ok=True)
        params = fit(recipe, material, work, report, params)
        ends.append(params)
    print(report(0, mean(*ends)), flush=True)
    history = [read_history(folder / name / "history.jsonl") for name in ("first", "longer")]
    write_card(args.out, history, runs, corpus, args.teacher, args.start)


if __name__ == "__main__":
    main()
