"""Transformers on the same device, in a process of its own."""

import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.gpu.run import Row, Run, guarded
from duetto.serve.planner.roofline.floor import program_demand
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.runtime.compiled.shapes import Shape


def bench_peers(run: Run) -> Iterator[Row]:
    """Transformers on the same card with random weights of the same sizes: static cache compiled, and
    continuous batching."""
    torch: Any = import_module("torch")
    model, prompt = peer_model(run, torch), [[5 + i % 99 for i in range(run.context)]]
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
    least = program_demand(shape, PRESETS[run.shape], run.dtype, run.context)
    return least.floor_seconds(run.peaks.flops16, run.peaks.bandwidth)
