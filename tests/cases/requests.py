"""Requests of different kinds for a small model, and what of their results must not change."""

from dataclasses import replace

from duetto import RequestOutput, SamplingParams
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER

# of the models that ship: with the tokenizer of the other
SMALLEST = str(DEMO_FOLDER.with_name("demo-draft"))

SIZES = {"max_num_seqs": 8, "max_prefill_tokens": 64, "max_model_len": 256, "page_size": 16}
# Of a command that finds the programs of an engine of these sizes, whatever the processor is.
FLAGS = ["--model", SMALLEST, "--dtype", "float32"]
FLAGS += [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=10, logprobs=2)
PENALISED = SamplingParams(
    temperature=0.8, seed=3, frequency_penalty=0.5, repetition_penalty=1.2, max_tokens=10
)
IDS = [5, 17, 200, 31, 8]
PROMPTS = [IDS, list(range(20, 60)), [7], list(range(100, 180))]
PARAMS = [GREEDY, SEEDED, PENALISED, replace(GREEDY, max_tokens=3, logprobs=0)]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def exact(outputs: list[RequestOutput]) -> list[tuple]:
    """Tokens and the bits of their log-probabilities."""
    return [
        (c.token_ids, [[x.logprob for x in at.values()] for at in c.logprobs or []], c.finish_reason)
        for output in outputs
        for c in output.outputs
    ]
