"""Requests whose bits no feature may change."""

import numpy as np

from duetto import RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3)
SEEDED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=11, max_tokens=24, logprobs=3)
PENALISED = SamplingParams(
    temperature=0.8,
    min_p=0.01,
    seed=5,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    max_tokens=24,
    logprobs=3,
)
BIASED = SamplingParams(
    temperature=0.7, seed=2**40 + 1, logit_bias={5: 2.0, 9: -3.0}, max_tokens=24, logprobs=3
)
PARAMS = [GREEDY, SEEDED, PENALISED, BIASED, GREEDY, SEEDED, PENALISED]
LENGTHS = [1, 5, 63, 64, 65, 130, 200]

BASE = {
    "max_num_seqs": 8,
    "max_prefill_tokens": 64,
    "max_model_len": 256,
    "page_size": 64,
    "decode_steps": 4,
}


def prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, vocab_size, n).tolist() for n in LENGTHS]


def bits(output: RequestOutput) -> list[tuple[int, bytes, tuple[int, ...]]]:
    """A request's tokens with the bits of every log-probability that it reports."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(t, np.array([x.logprob for x in at.values()]).tobytes(), tuple(at)) for t, at in steps]
