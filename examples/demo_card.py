"""Write the model card of a demo model: figures measured on the written folder, unselected samples, the loss
curve."""

import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_corpus import Corpus, blocks, encode
from demo_fit import Recipe, logits
from demo_sample import complete, definitions, parses
from tokenizers import Tokenizer

from duetto.checkpoints.huggingface import load_hf
from duetto.model.config import Dense, GroupedQuery, ModelConfig
from duetto.model.transformer import Decoder

Model = tuple[ModelConfig, Decoder]
PROMPTS = (
    "import os\n\ndef read_lines(path",
    "class Queue:\n    def __init__(self",
    "def is_prime(n):\n    ",
    "# Return the sum of a list of numbers.\n",
)
HEADS = ("\n\ndef", "\n\ndef ", "\n    def")
LINES = 200


def measured(model: Model, stream: np.ndarray, T: int) -> np.ndarray:
    """Return the nats of every token of a stream read in windows of T, float64 [blocks, T]."""
    config, params = model

    @jax.jit
    def nats(window: jax.Array) -> jax.Array:
        scores = logits(params, config, window[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(scores, window[:, 1:])[0]

    return np.stack([np.asarray(nats(row[None]), np.float64) for row in blocks(stream, T)])


def agreement(draft: Model, target: Model, stream: np.ndarray, T: int = 256) -> tuple[float, float]:
    """Return how often the draft's likeliest token is the target's, and the overlap of their distributions.

    The first is the acceptance rate of greedy speculative decoding, the second that of sampling at
    temperature 1 (Leviathan et al., arXiv 2211.17192), each along the text of the stream.
    """

    @jax.jit
    def shares(window: jax.Array) -> jax.Array:
        p, q = (jax.nn.softmax(logits(w, c, window)[0]) for c, w in (draft, target))
        return jnp.stack([jnp.mean(p.argmax(-1) == q.argmax(-1)), jnp.minimum(p, q).sum(-1).mean()])

    both = np.mean([shares(row[None, :-1]) for row in blocks(stream, T)], axis=0)
    return float(both[0]), float(both[1])


def read_history(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def joined(histories: Sequence[list[dict]]) -> list[dict]:
    """Return the histories of consecutive runs as one history."""
    rows, before = [], 0
    for history in histories:
        rows += [row | {"step": before + row["step"]} for row in history]
        before = rows[-1]["step"]
    return rows


def draw_losses(rows: list[dict], path: Path) -> None:
    """Draw the loss curve as a small SVG, the same bytes for the same history."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "duetto"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for name in ("train", "validation"):
        axes.plot([r["step"] for r in rows], [r[name] for r in rows], label=name, linewidth=1.5)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def fenced(text: str) -> str:
    return f"````python\n{text}\n````\n"


def size_lines(folder: Path, model: Model) -> str:
    config, params = model
    mixer, ffn = config.layers[0].mixer, config.layers[0].ffn
    assert isinstance(mixer, GroupedQuery) and isinstance(ffn, Dense)
    count = sum(x.size for x in jax.tree.leaves(params))
    size = (folder / "model.safetensors").stat().st_size
    return f"""| | |
|---|---|
| parameters | {count:,}, embedding tied to the output |
| `model.safetensors` | {size:,} bytes, bfloat16 |
| layers, width, FFN | {config.num_layers}, {config.hidden_size}, {ffn.size} |
| heads | {mixer.num_heads} query, {mixer.num_kv_heads} key/value, of {mixer.head_size} |
| vocabulary | {config.vocab_size}, byte-level BPE; `<\\|endoftext\\|>` begins and ends a file |
| context | {config.max_position} tokens |
"""


def quality_lines(model: Model, tokenizer: Tokenizer, corpus: Corpus) -> str:
    texts = list(corpus.validation.values())
    stream, size = encode(tokenizer, texts), sum(len(t.encode()) for t in texts)
    rows = []
    for T in (256, 1024):
        nats = measured(model, stream, T)
        bits = nats.mean() / math.log(2) * len(stream) / size
        rows.append(f"| {T} | {nats.mean():.3f} | {math.exp(nats.mean()):.2f} | {bits:.3f} |")
    by_place = [
        f"{nats[:, a:b].mean():.3f} ({a}-{b - 1})" for a, b in ((0, 64), (64, 256), (256, 512), (512, 1024))
    ]
    return f"""Validation is {len(texts)} files that training never saw ({size:,} bytes,
{len(stream):,} tokens), every token counted, read in windows that do not overlap. Figures are of the
rounded bfloat16 weights, computed in float32.

| window | nats per token | perplexity per token | bits per byte |
|---|---|---|---|
{chr(10).join(rows)}

By position in a window of 1024, nats per token: {", ".join(by_place)}.
"""


def parse_lines(model: Model, tokenizer: Tokenizer) -> str:
    rows = []
    for head in HEADS:
        lines = definitions(model, tokenizer, head, LINES)
        rows.append(f"| `{json.dumps(head)}` | {sum(map(parses, lines))} of {LINES} |")
    return f"""Share of sampled lines that parse: after a prompt that ends in `def`, the rest of the line
(temperature 1, no top-k or top-p, seed 0) is given to `ast.parse` with a body of `pass`. A signature that
goes on over the next line counts as a failure.

| prompt | parse |
|---|---|
{chr(10).join(rows)}
"""


def sample_lines(model: Model, tokenizer: Tokenizer) -> str:
    kinds = (("Temperature 0.7, seed 0", 0.7), ("Greedy", 0.0))
    parts = []
    for title, temperature in kinds:
        texts = complete(model, tokenizer, list(PROMPTS), 80, temperature)
        parts += [f"{title}:\n", *(fenced(p + t) for p, t in zip(PROMPTS, texts, strict=True))]
    return "\n".join(parts)


def corpus_lines(corpus: Corpus) -> str:
    size = sum(len(t.encode()) for t in corpus.train.values())
    return f"""Python's own standard library, version {platform.python_version()}, as it lies beside the
interpreter that trained the model: {len(corpus.train)} files, {size:,} bytes, without test suites, `idlelib`,
`turtledemo`, `encodings` and `pydoc_data`. A file belongs to validation if the SHA-256 of its name says so
(one in sixteen). The library is © Python Software Foundation and others, used under the PSF License Agreement
Version 2 (https://docs.python.org/3/license.html); samples may repeat passages of it.
The weights that ship with duetto are licensed under Apache-2.0 (`LICENSE` beside this page)."""


def run_line(recipe: Recipe) -> str:
    stretches = ", then ".join(f"{p.steps} steps of {p.batch} x {p.context} tokens" for p in recipe.phases)
    return f"{stretches} at a peak rate of {recipe.learning_rate}"


def training_lines(
    folder: Path, rows: list[dict], runs: Sequence[Recipe], teacher: Path | None, start: Path | None
) -> str:
    flags = (f" --{name} {path}" for name, path in (("teacher", teacher), ("start", start)) if path)
    command = f"python examples/train_demo.py --out {folder}{''.join(flags)}"
    tokens = sum(p.steps * p.batch * p.context for recipe in runs for p in recipe.phases)
    minutes, one = sum(row["seconds"] for row in rows) / 60, runs[0]
    loss = (
        "Nats per token"
        if teacher is None
        else "Training: the mixed loss. Other curve: nats per token of the text"
    )
    before = f"It goes on from the weights that were in `{start}`. " if start else ""
    return f"""`{command} --seed {one.seed}`

{before}Two runs, {tokens / 1e6:.1f} M tokens in all:
{"; then, to look back further, ".join(map(run_line, runs))}.
The weights kept are the mean of both ends, a quarter of the first and three of the second. Muon for the
matrices, AdamW for the embedding and the norms, weight decay {one.weight_decay}, gradients clipped at
{one.clip}; in each run warm-up, plateau, and a line to zero over the last three tenths. One word in fifty is
cut from the space before it, so that prompts may end in a space. It took {minutes:.0f} minutes on a busy CPU.
The result depends on the corpus, the seed, the number of steps and the first weights, not on the clock; other
processors round differently.

![loss by step](loss.svg)

{loss}, validation in windows of 256 tokens.
"""


def introduction(folder: Path, draft: Model, teacher: Path | None, stream: np.ndarray) -> str:
    if teacher is None:
        return """# duetto demo

A small Llama that writes something like Python. It ships with duetto so that everything can be tried in
seconds, offline, on a real trained model; it is for tests, demonstrations and benchmarks, and of no use for
anything else.
"""
    greedy, sampled = agreement(draft, load_hf(teacher, jnp.float32), stream)
    return f"""# duetto demo, the draft

A draft for speculative decoding of `{teacher.name}`, with the same tokenizer: it learned that model's
distribution (cross entropy with the teacher's probabilities, weight 0.8) and the corpus's own tokens (weight
0.2).

Acceptance along the validation text: its likeliest token is the teacher's for **{greedy:.1%}** of positions
(greedy decoding); the two distributions share **{sampled:.1%}** of their probability (rejection sampling at
temperature 1).
"""


def write_card(
    folder: Path,
    histories: Sequence[list[dict]],
    runs: Sequence[Recipe],
    corpus: Corpus,
    teacher: Path | None,
    start: Path | None = None,
) -> None:
    """Write README.md and loss.svg of a finished folder, from its runs and their histories."""
    model, tokenizer = load_hf(folder, jnp.float32), Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = joined(histories)
    draw_losses(rows, folder / "loss.svg")
    stream = encode(tokenizer, list(corpus.validation.values()))
    card = f"""{introduction(folder, model, teacher, stream)}
## Sizes

{size_lines(folder, model)}
## Data and licence

{corpus_lines(corpus)}

## Training

{training_lines(folder, rows, runs, teacher, start)}
## Quality

{quality_lines(model, tokenizer, corpus)}
{parse_lines(model, tokenizer)}
## Samples, unedited

The first lines of each are the prompt: {", ".join(f"`{json.dumps(p)}`" for p in PROMPTS)}.

{sample_lines(model, tokenizer)}
## Limits

- It imitates the look of the standard library. What it writes seldom runs and means nothing; names and facts
  are made up.
- It knows no other language and no instructions. The chat template turns every user message into a Python
  comment, so that chat requests can be tried; the reply is whatever code or comment follows.
- It was trained on a few megabytes, several times over, and repeats passages of them; long outputs loop.
- Past {model[0].max_position} tokens it was never trained.
"""
    (folder / "README.md").write_text(card, encoding="utf-8")
