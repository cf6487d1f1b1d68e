"""Train the two models that ship, each from nothing, on this interpreter's standard library.

    python examples/train_demo.py --out checkpoints/demo
    python examples/train_demo.py --out checkpoints/demo-draft --teacher checkpoints/demo

The second is a draft a tenth the size, distilled from the first. A run depends on the standard library, the seed and
the number of steps, never on the clock; killed and started again, it resumes. Two cores take about an hour and a
quarter of an hour.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
from demo_card import write_card
from demo_corpus import cut_spaces, encode, standard_library, train_tokenizer
from demo_fit import Phase, Recipe, Teacher, evaluate, fit
from demo_folder import rounded, write_folder
from tokenizers import Tokenizer

from duetto.checkpoints.huggingface import load
from duetto.model.config import ModelConfig

VOCABULARY = 2048
CONTEXT = 1024
STEPS, DRAFT_STEPS = 6000, 4000
CUT = 0.02  # share of words cut from the space before them


def phases(steps: int) -> tuple[Phase, ...]:
    """Nearly all steps read 256 tokens; the last twenty-fifth reads 1024, so that the model learns to look that far."""
    long = steps // 25
    return Phase(steps - long, batch=8, context=256), Phase(long, batch=2, context=CONTEXT)


def demo_recipe(steps: int, seed: int) -> Recipe:
    """2.4 M parameters."""
    config = ModelConfig(
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
    config = ModelConfig(
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
    parser.add_argument("--work", type=Path, help="checkpoints and history (default: build/<name of OUT>)")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}, or {DRAFT_STEPS} for a draft")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    work = args.work or Path("build") / args.out.name
    work.mkdir(parents=True, exist_ok=True)
    corpus, teacher = standard_library(), None
    if args.teacher:
        tokenizer = Tokenizer.from_file(str(args.teacher / "tokenizer.json"))
        recipe = draft_recipe(args.steps or DRAFT_STEPS, args.seed)
        teacher = Teacher(*load(args.teacher, jnp.float32))
    else:
        tokenizer = train_tokenizer(list(corpus.train.values()), VOCABULARY)
        recipe = demo_recipe(args.steps or STEPS, args.seed)
    stream = cut_spaces(encode(tokenizer, list(corpus.train.values())), tokenizer, CUT, args.seed)
    held_out = encode(tokenizer, list(corpus.validation.values()))

    def report(step, params):
        kept = rounded(params)
        write_folder(args.out, recipe.config, kept, tokenizer)
        return {"validation": evaluate(kept, recipe.config, held_out, 256, limit=40_000)}

    fit(recipe, stream, work, report, teacher)
    write_card(args.out, work / "history.jsonl", recipe, corpus, args.teacher)


if __name__ == "__main__":
    main()
