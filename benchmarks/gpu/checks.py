"""Whether it is right: the kernels beside the reference, and bits that follow from a row alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.attention import attention_inputs, by_blocks, by_kernels
from benchmarks.gpu.run import Row, Run
from duetto import LLM, SamplingParams
from duetto.kvcache.kernels import attention as kernels
from duetto.kvcache.kernels import hopper_attention
from duetto.serve.runtime.compiled import executable_cache


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
        patch.object(kernels, "kernel_refusal", lambda *_: "left out"),
        patch.object(hopper_attention, "may_use_hopper_kernel", lambda *_: False),
        patch.object(executable_cache, "program_folder", lambda: None),
    ):
        yield
