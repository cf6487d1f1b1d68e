"""Requests that come while others run: one step at a time."""

from dataclasses import asdict

from duetto import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from duetto.sampling_params import RequestOutputKind

WAITING = [
    ("def first(", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=6)),
    ("def second(", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=9)),
    ("def third(", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1, max_tokens=5)),
    ("def fourth(", SamplingParams(temperature=0.0, max_tokens=4, output_kind=RequestOutputKind.DELTA)),
]


def main():
    args = EngineArgs(
        model="checkpoints/demo", max_model_len=256, max_num_seqs=8, block_size=16, max_num_batched_tokens=64
    )
    assert asdict(args)["tensor_parallel_size"] == 1
    engine = LLMEngine.from_engine_args(args)
    waiting, pieces, steps = list(enumerate(WAITING)), [], 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            number, (prompt, params) = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
        reports: list[RequestOutput] = engine.step()
        steps += 1
        pieces += [o.outputs[0].token_ids for o in reports if o.request_id == "3"]
        for output in reports:
            if output.finished and output.request_id != "3":
                print(f"request {output.request_id} ended: {[c.text for c in output.outputs]}")
    print(
        "pieces of the last:", sum(map(len, pieces)), "tokens, at most one each:", max(map(len, pieces)) == 1
    )
    print("took fewer steps than tokens:", steps < 6 + 9 + 5 + 5 + 4)


if __name__ == "__main__":
    main()
