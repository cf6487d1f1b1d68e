"""What one NVIDIA GPU reaches, beside what it could: `benchmarks/gpu.sh` runs this; a table is printed, one
JSON file holds it.

Two ceilings are measured first, a copy in the device's memory and a large product in bfloat16; shares are of
these. Parts run in the order of their worth until the time is over, and the file is written after each
figure. `--dry` runs every part on a tiny shape on any device, to see that it runs: its figures mean nothing.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from duetto import LLM, SamplingParams
from duetto.kvcache import kernels
from duetto.kvcache.kernels import Pages, attend_pages
from duetto.kvcache.pages import Batch, read_keys, running_softmax
from duetto.model.attention import Reading
from duetto.model.transformer import decoder_spec
from duetto.model.tree import init
from duetto.serve.commands.bench import Model, measure, median_seconds
from duetto.serve.options.engine import EngineOptions
from duetto.serve.programs import kept
from duetto.serve.programs.shapes import ROW_TOKENS, Shape
from duetto.serve.roofline.floor import demand
from duetto.serve.roofline.presets import PRESETS
from duetto.serve.roofline.targets import Peaks

PAGE = 64
READING = Reading(0.125)
Attention = Callable[[jax.Array, Pages], jax.Array]


class Row(NamedTuple):
    """One figure; `share` is what it reaches of a ceiling, or of what should be."""

    part: str
    what: str
    value: float
    unit: str
    share: float | None = None


@dataclass(frozen=True)
class Run:
    """What is measured: a preset cut to `layers` layers, at these widths, tokens in the cache and prompt
    lengths."""

    shape: str = "8b"
    layers: int | None = None
    dtype: str = "bfloat16"
    widths: tuple[int, ...] = (1, 64, 256)
    context: int = 1024
    long: int = 8192
    prompt: int = 4096
    repeats: int = 10
    dry: bool = False

    @cached_property
    def peaks(self) -> Peaks:
        """Operations and bytes a second of this device, as a product and a copy reach them."""
        n, size = (256, 1 << 20) if self.dry else (8192, 1 << 30)
        square, long = jnp.ones((n, n), jnp.bfloat16), jnp.ones(size // 2, jnp.bfloat16)
        product = median_seconds(partial(jax.jit(jnp.matmul), square, square), self.repeats)
        copied = median_seconds(partial(jax.jit(jnp.negative), long), self.repeats)
        return Peaks(2 * n**3 / product, 2 * n**3 / product, 2 * size / copied, 0.0, 0)

    @cached_property
    def model(self) -> Model:
        """Random weights of the shape."""
        config = PRESETS[self.shape]
        config = replace(config, layers=config.layers[: self.layers])
        params = init(jax.random.key(0), decoder_spec(config), jnp.dtype(self.dtype))
        return Model(self.shape, config, params, EngineOptions(page_size=PAGE))


DRY = Run("135m", 1, "float32", (1, 2), 64, 128, 64, 1, dry=True)


# ---------------------------------------------------------------- one layer's attention


def by_kernels(q: jax.Array, pages: Pages) -> jax.Array:
    return attend_pages(q, pages, READING, interpret=jax.default_backend() == "cpu")


def by_blocks(q: jax.Array, pages: Pages) -> jax.Array:
    """The reference, which gathers a block's pages."""
    B, T = q.shape[:2]
    batch = Batch(jnp.zeros((B, T), jnp.int32), pages.start, pages.count, (pages.table,), pages.start)
    read = partial(read_keys, pages[:2], pages.table, READING, q.dtype)
    return running_softmax(q, batch, read, READING).astype(q.dtype)


def by_gather(q: jax.Array, pages: Pages) -> jax.Array:
    """All pages side by side, then XLA's own attention: for whole tables only."""
    k, v = (pool[:, pages.table].transpose(1, 2, 3, 0, 4) for pool in pages[:2])  # [B,M,W,K,H]
    k, v = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in (k, v))
    return jax.nn.dot_product_attention(
        q, k, v, scale=READING.scale, key_value_seq_lengths=pages.start + 1, implementation="xla"
    )


def by_cudnn(q: jax.Array, pages: Pages) -> jax.Array:
    """cuDNN's paged attention, which jax has in private only; its pages are [P,K,W,H], so it is given other
    pools."""
    cudnn: Any = import_module("jax._src.cudnn.fused_attention_stablehlo")
    k, v = (pool.swapaxes(0, 1) for pool in pages[:2])
    table, length = pages.table[:, None, :, None], pages.start + pages.count
    ones = jnp.full(q.shape[0], q.shape[1], jnp.int32)
    out = cudnn.paged_attention(
        q.swapaxes(1, 2), k, v, ones, length, table, table,
        scale=READING.scale, mask_type=cudnn.MaskType.PADDING, qkv_layout="BNTH",
    )  # fmt: skip
    return (out[0] if isinstance(out, (tuple, list)) else out).swapaxes(1, 2)


def by_cudnn_chunk(q: jax.Array, pages: Pages) -> jax.Array:
    """cuDNN's attention over a prompt's own keys, gathered once."""
    k, v = (pool[:, pages.table[0]].reshape(pool.shape[0], -1, pool.shape[3]) for pool in pages[:2])
    k, v = (x.swapaxes(0, 1)[None, : q.shape[1]] for x in (k, v))
    return jax.nn.dot_product_attention(q, k, v, scale=READING.scale, is_causal=True, implementation="cudnn")


def attention_inputs(run: Run, B: int, T: int, context: int) -> tuple[jax.Array, Pages]:
    """Rows whose last tokens are the T queries, over random pages in a random order."""
    K, N, H, M = (2, 4, 64, -(-context // PAGE)) if run.dry else (8, 32, 128, -(-context // PAGE))
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (B, T, N, H), run.dtype)
    k, v = (jax.random.normal(key, (K, B * M, PAGE, H), run.dtype) for key in keys[1:])
    table = np.random.default_rng(0).permutation(B * M).reshape(B, M)
    start, count = jnp.full(B, context - T, jnp.int32), jnp.full(B, T, jnp.int32)
    return q, Pages(k, v, jnp.asarray(table, jnp.int32), start, count)


def seconds_of(attend: Attention, q: jax.Array, pages: Pages, times: int) -> float:
    """Seconds of a call among `times` in one program, each with the last one's output for queries."""

    @jax.jit
    def repeated(q: jax.Array, pages: Pages) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, q: attend(q, pages).astype(q.dtype), q)

    return median_seconds(partial(repeated, q, pages), 1) / times


def bench_attention(run: Run) -> Iterator[Row]:
    """Ways to read pages beside each other: of single tokens the share of the memory's rate, of a prompt of
    the product's."""
    times = 1 if run.dry else 20
    decode = {
        "kernels": by_kernels,
        "reference": by_blocks,
        "gather, XLA": by_gather,
        "cuDNN paged": by_cudnn,
    }
    for B, context in (*((width, run.context) for width in run.widths), (8, run.long)):
        q, pages = attention_inputs(run, B, 1, context)
        for name, attend in decode.items():
            what = f"{name}, {B} rows, context {context}"
            time_it = partial(seconds_of, attend, q, pages, times)
            yield from guarded("attention", what, time_it, "us", 2 * pages.k.nbytes / run.peaks.bandwidth)
    q, pages = attention_inputs(run, 1, run.prompt, run.prompt)
    least = 2 * q.shape[1] * q.size / run.peaks.flops16  # 4 T^2/2 N H operations
    for name, attend in {
        "kernels": by_kernels,
        "reference": by_blocks,
        "gather, cuDNN": by_cudnn_chunk,
    }.items():
        what = f"{name}, prompt of {run.prompt}"
        yield from guarded("attention", what, partial(seconds_of, attend, q, pages, times), "us", least)


def guarded(part: str, what: str, measured: Callable[[], float], unit: str, least: float) -> Iterator[Row]:
    """A row of a time and the share that the least possible is of it; what cannot run here is said and left
    out."""
    try:
        seconds = measured()
    except Exception as error:  # noqa: BLE001 - a peer's failure must not end the run
        print(f"  {part}: {what} does not run: {str(error).splitlines()[0][:120]}", flush=True)
        return
    scale = {"us": 1e6, "ms": 1e3}[unit]
    yield Row(part, what, seconds * scale, unit, least / seconds)


# ---------------------------------------------------------------- is it right


def bench_checks(run: Run) -> Iterator[Row]:
    """The kernels against the reference, and whether bits follow from a row alone: shares below 1 are
    failures."""
    for T in (1, run.prompt // 8):
        q, pages = attention_inputs(run, 4, T, run.context)
        pages = pages._replace(start=pages.start - jnp.arange(4, dtype=jnp.int32) * 7)
        found, wanted = (np.asarray(jax.jit(f)(q, pages), np.float32) for f in (by_kernels, by_blocks))
        yield Row(
            "checks", f"kernels - reference, {T} tokens", float(np.abs(found - wanted).max()), "at most"
        )
        alone = pages._replace(table=pages.table[2:3], start=pages.start[2:3], count=pages.count[2:3])
        same = np.array_equal(np.asarray(jax.jit(by_kernels)(q[2:3], alone), np.float32)[0], found[2])
        yield Row(
            "checks", f"a row alone and among others, {T} tokens", float(same), "equal bits", float(same)
        )
    yield from demo_checks(run)


def demo_checks(run: Run) -> Iterator[Row]:
    """The demo model's tokens: requests alone and together, and with the reference in place of the
    kernels."""
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=24, logprobs=1)
        for i, t in enumerate((0.0, 0.0, 1.0, 0.8))
    ]
    prompts = [[(7 * i + j) % 200 + 3 for j in range(5 + 40 * i)] for i in range(len(params))]

    def answers(dtype: str, *calls: list[int]) -> list[Any]:
        """Of requests in these calls of one engine."""
        with LLM(max_model_len=256, max_num_seqs=8, dtype=dtype) as llm:
            outputs = [
                o for c in calls for o in llm.generate([prompts[i] for i in c], [params[i] for i in c], False)
            ]
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    every = list(range(len(prompts)))
    found = answers("auto", *([i] for i in every), every)
    same = sum(a == b for a, b in zip(found[: len(every)], found[len(every) :], strict=True)) / len(every)
    yield Row("checks", "requests alone and together: tokens and log-probabilities", same, "of 1", same)
    exact = answers("float32", every)
    with reference_only():
        plain = answers("float32", every)
    same = sum(a[0] == b[0] for a, b in zip(exact, plain, strict=True)) / len(every)
    yield Row("checks", "kernels and reference in float32: tokens", same, "of 1", same)


@contextmanager
def reference_only() -> Iterator[None]:
    """While this is entered, programs are made without the kernels, and none is taken from disk."""
    with (
        patch.object(kernels, "compiles_for_gpus", lambda: False),
        patch.object(kept, "folder", lambda: None),
    ):
        yield


# ---------------------------------------------------------------- whole programs


def program(run: Run, shape: Shape, context: int, kernels: bool = True, each: int = 1) -> Row:
    """A compiled step's time, and its floor's share of it; `each` steps are in one dispatch."""
    gc.collect()
    with nullcontext() if kernels else reference_only():
        row = measure(run.model, shape, context, run.repeats, run.peaks)
    assert row.floor is not None
    what = f"{shape}, context {context}" + ("" if kernels else ", without kernels")
    return Row(shape.phase, what, row.seconds * 1e3 / each, "ms", row.floor / row.seconds)


def bench_decode(run: Run) -> Iterator[Row]:
    for width in run.widths:
        yield program(run, Shape("decode", width, 1), run.context)


def bench_prefill(run: Run) -> Iterator[Row]:
    """A prompt in one row, and in the short rows in which several prompts share a call."""
    yield program(run, Shape("prefill", 1, run.prompt), 0)
    yield program(run, Shape("prefill", run.prompt // ROW_TOKENS, ROW_TOKENS), 0)


def bench_steps(run: Run) -> Iterator[Row]:
    """Four steps in one dispatch: what calling the program costs."""
    yield program(run, Shape("decode", run.widths[1], 4), run.context, each=4)


def bench_reference(run: Run) -> Iterator[Row]:
    yield program(run, Shape("decode", run.widths[1], 1), run.context, kernels=False)
    yield program(run, Shape("prefill", 1, run.prompt), 0, kernels=False)


# ---------------------------------------------------------------- Transformers, in a process of its own


def bench_peers(run: Run) -> Iterator[Row]:
    """Transformers on the same card with random weights of the same sizes: static cache compiled, and
    continuous batching."""
    torch: Any = import_module("torch")
    model = peer_model(run, torch)
    prompt = [[5 + i % 99 for i in range(run.context)]]
    for width in run.widths[:2]:
        ids = torch.tensor(prompt * width, device=model.device)
        least = floor_of(run, Shape("decode", width, 1))
        what = f"Transformers, static cache, {width} rows, context {run.context}"
        yield from guarded(
            "peers",
            what,
            partial(static_step, torch, model, ids, *((2, 6) if run.dry else (16, 80))),
            "ms",
            least,
        )
    width, tokens = run.widths[1], 4 if run.dry else 64
    least = floor_of(run, Shape("decode", width, 1))
    what = f"Transformers, continuous batching, {width} rows, a token of each"
    yield from guarded("peers", what, partial(continuous_step, model, prompt * width, tokens), "ms", least)


def peer_model(run: Run, torch: Any) -> Any:
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    c = PRESETS[run.shape]
    mixer: Any
    ffn: Any
    mixer, ffn = c.layers[0].mixer, c.layers[0].ffn
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=ffn.size,
        num_hidden_layers=run.layers or c.num_layers, num_attention_heads=mixer.num_heads,
        num_key_value_heads=mixer.num_kv_heads, max_position_embeddings=c.max_position,
    )  # fmt: skip
    where = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(where):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, run.dtype))
    return model.eval()


def static_step(torch: Any, model: Any, ids: Any, few: int, many: int) -> float:
    """Seconds of a step of `generate`, from two lengths of its answer; Transformers compiles the step by
    itself."""

    def generate(tokens: int) -> float:
        begin = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            cache_implementation="static", max_new_tokens=tokens, min_new_tokens=tokens,
        ).cpu()  # fmt: skip
        return time.perf_counter() - begin

    for tokens in (few, many, few, many):  # compilation and warm-up
        generate(tokens)
    return (min(generate(many) for _ in range(3)) - min(generate(few) for _ in range(3))) / (many - few)


def continuous_step(model: Any, prompts: list[list[int]], tokens: int) -> float:
    """Seconds of a step in which each request gets a token, its share of the prompts' reading included."""
    transformers: Any = import_module("transformers")
    config = transformers.GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def generate() -> float:
        begin = time.perf_counter()
        model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        return time.perf_counter() - begin

    generate()
    return generate() / tokens


def floor_of(run: Run, shape: Shape) -> float:
    least = demand(shape, PRESETS[run.shape], run.dtype, run.context)
    return least.floor(run.peaks.flops16, run.peaks.bandwidth)


# ---------------------------------------------------------------- the command

PARTS: dict[str, Callable[[Run], Iterator[Row]]] = {
    "checks": bench_checks,
    "decode": bench_decode,
    "prefill": bench_prefill,
    "attention": bench_attention,
    "reference": bench_reference,
    "steps": bench_steps,
    "peers": bench_peers,
}


def about() -> dict[str, Any]:
    """The device, and the versions and settings that the figures depend on."""

    def known(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = (
        "jax",
        "jaxlib",
        "jax-cuda12-plugin",
        "jax-cuda13-plugin",
        "nvidia-cudnn-cu13",
        "torch",
        "transformers",
    )
    settings = {k: v for k, v in os.environ.items() if k.startswith(("XLA_", "JAX_"))}
    device = jax.devices()[0].device_kind
    return {"date": time.strftime("%Y-%m-%d"), "device": device, "settings": settings} | {
        p: v for p in packages if (v := known(p))
    }


def shown(row: Row) -> str:
    share = "" if row.share is None else f"{row.share:>8.1%}"
    return f"{row.part:<10} {row.what:<62}{row.value:>12.4g} {row.unit:<10}{share}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="JSON file to write; figures that it has are kept")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[p for p in PARTS if p != "peers"])
    parser.add_argument("--seconds", type=float, default=400, help="no part is begun later (default: 400)")
    parser.add_argument("--dry", action="store_true", help="a tiny shape, on any device")
    args = parser.parse_args()
    begin, run = time.monotonic(), DRY if args.dry else Run()
    found = json.loads(args.file.read_text()) if args.file.exists() else {"about": about(), "rows": []}
    found["ceilings"] = {"flops": run.peaks.flops16, "bytes": run.peaks.bandwidth}
    print(
        f"{found['about']['device']}: {run.peaks.flops16 / 1e12:.4g} TFLOP/s, "
        f"{run.peaks.bandwidth / 1e9:.4g} GB/s"
    )
    for part in args.parts:
        if time.monotonic() - begin > args.seconds:
            print(f"  {part} is left out: the time is over", flush=True)
            continue
        for row in PARTS[part](run):
            print(shown(row), flush=True)
            found["rows"].append(row._asdict())
            args.file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
