"""What each rank of a group runs in `test_two_processes.py`; rank 0 prints what it served as JSON."""

import json
import sys
from typing import Any

from duetto import LLM, SamplingParams
from duetto.sampling.structured import StructuredOutputsParams
from duetto.serve.engine.startup import start
from duetto.serve.llm.weights import set_answer_realm

# One program fewer to compile, in each of three processes: one row of prefill serves all prompts.
ALL_SHAPES = start.engine_shapes
start.engine_shapes = lambda *given: [s for s in ALL_SHAPES(*given) if s.phase != "prefill" or s.rows == 1]

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
    {"temperature": 0.9, "seed": 5, "n": 2, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


def serve(options: dict[str, Any], prompts: list[list[int]], ends: bool) -> dict[str, Any]:
    """Tokens of requests that share prompts, preempt each other, and are aborted."""
    llm = LLM(**options)
    found: dict[str, Any] = {"devices": llm.get_world_size()}
    for name, params in enumerate(REQUESTS):
        sampling = SamplingParams(max_tokens=16, ignore_eos=True, **params)
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        found[str(name)] = [[list(one.token_ids) for one in out.outputs] for out in outs]
    for i, prompt in enumerate(prompts):
        llm.add_request({"prompt_token_ids": prompt}, SamplingParams(max_tokens=40, ignore_eos=True), str(i))
    for _ in range(3):
        llm.step()
    llm.abort("1")
    if llm.tokenizer is not None:
        digits = StructuredOutputsParams(regex="[0-9]{40}")
        sampling = SamplingParams(temperature=0.9, seed=3, max_tokens=6, structured_outputs=digits)
        found["digits"] = (
            llm.generate({"prompt_token_ids": prompts[2]}, sampling, use_tqdm=False)[0].outputs[0].text
        )
    while llm.has_unfinished_requests():
        llm.step()
    found["again"] = list(
        llm.generate({"prompt_token_ids": prompts[0]}, SamplingParams(temperature=0.0, max_tokens=5))[0]
        .outputs[0]
        .token_ids
    )
    if "nnodes" in options:
        found["realm"] = set_answer_realm(llm.session, llm.input_processor).name
        found["refused"] = [refusal(llm, call) for call in ("sleep", "save_cache", "update_params")]
    report = llm.report()
    found |= {name: report[name] for name in ("preemptions", "compilations")}
    if ends:
        llm.close()  # else the end of the process says so
    return found


def refusal(llm: LLM, method: str) -> str | None:
    """What is said of a method that one process alone could do."""
    given = {"sleep": (), "save_cache": ("nowhere",), "update_params": (llm.params,)}
    try:
        getattr(llm, method)(*given[method])
    except ValueError as error:
        return str(error)
    return None


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps(serve(**given)))
