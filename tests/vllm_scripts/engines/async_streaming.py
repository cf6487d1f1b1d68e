"""Several streams in one event loop, one of them paused on the way."""

import asyncio

from duetto import SamplingParams
from duetto.engine.arg_utils import AsyncEngineArgs
from duetto.sampling_params import RequestOutputKind
from duetto.v1.engine.async_llm import AsyncLLM


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    params = SamplingParams(
        temperature=0.8, seed=42, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    text = ""
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        text += output.outputs[0].text
    return text


async def pause(engine: AsyncLLM) -> None:
    await engine.pause_generation(mode="keep")
    print("paused:", await engine.is_paused())
    await engine.resume_generation()


async def main():
    args = AsyncEngineArgs(
        model="checkpoints/demo",
        max_model_len=256,
        max_num_seqs=8,
        block_size=16,
        max_num_batched_tokens=64,
        enforce_eager=True,
    )
    engine = AsyncLLM.from_engine_args(args)
    try:
        prompts = ["def f(", "class A:", "import "]
        streams = [stream(engine, prompt, f"stream-{i}") for i, prompt in enumerate(prompts)]
        *together, _ = await asyncio.gather(*streams, pause(engine))
        for i, text in enumerate(together):
            print(f"stream-{i} finished:", repr(text))
        print("as if alone:", together[1] == await stream(engine, prompts[1], "again"))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
