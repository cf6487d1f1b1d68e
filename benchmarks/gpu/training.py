"""Log-probabilities that a trainer differentiates: whether they are the sampler's, and what they cost."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.run import Row, Run
from benchmarks.gpu.serving import engine_for
from duetto import LLM, SamplingParams
from duetto.serve.cli.bench import median_seconds
from duetto.train import token_logprobs

TRAINED_LAYERS = 4  # layers, as a gradient takes the memory of several copies of the weights


def bench_training(run: Run) -> Iterator[Row]:
    """A replay of sampled texts, beside a pass over whole texts, as part of a training step; shares are of
    the pass. The share of equal tokens should be 1."""
    run = replace(run, layers=min(run.layers or TRAINED_LAYERS, TRAINED_LAYERS))
    rows, prompt, output = run.widths[1], run.prompt // 8, run.prompt // 32
    with engine_for(run, rows, prompt + output) as llm:
        texts, reported = sample_texts(llm, rows, prompt, output)
        params, config = llm.params, llm.config
        try:
            score = partial(llm.logprobs_fn(), prompt_lengths=np.full(rows, prompt))
        except ValueError as error:
            print(f"  training: {error}", flush=True)
            yield Row("training", "sampled tokens with equal bits", 0.0, "of 1", 0.0)
            return
    gc.collect()
    plain = partial(token_logprobs, config=config, exact=False)
    steps = [jax.jit(jax.value_and_grad(partial(loss, f, texts), has_aux=True)) for f in (score, plain)]
    scores = np.asarray(steps[0](params)[0][1])[:, prompt - 1 :]
    equal = float((scores == reported).mean())
    yield Row("training", "sampled tokens with equal bits", equal, "of 1", equal)
    replayed, plainly = (median_seconds(partial(step, params), run.repeats) for step in steps)
    what = f"a step of {rows} texts, {prompt} + {output} tokens, {run.layers} layers"
    yield Row("training", f"{what}, by a replay", replayed * 1e3, "ms", plainly / replayed)
    yield Row("training", f"{what}, plainly", plainly * 1e3, "ms", 1.0)


def sample_texts(llm: LLM, rows: int, prompt: int, output: int) -> tuple[Any, Any]:
    """Return texts [rows,tokens], and the log-probabilities that were reported [rows,output]."""
    params = SamplingParams(temperature=1.0, max_tokens=output, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [[(13 * r + 7 * i) % 9999 + 3 for i in range(prompt)] for r in range(rows)]
    answers = [result.outputs[0] for result in llm.generate(prompts, params, use_tqdm=False)]
    texts = [prompt + list(answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    return np.array(texts), np.array([answer.logprob_array for answer in answers])


def loss(score: Any, texts: Any, params: Any) -> tuple[Any, Any]:
    logprobs = score(params, tokens=texts)
    return logprobs.mean(), logprobs
