"""What serving adds to the time of a job: the same requests through a server, and offline.

    python benchmarks/studies/gap.py --seats 32 --step 10

Both engines run on a simulated device, whose steps take as many milliseconds as are said, so that the host's
work is all that differs. The server is a process of its own, the clients another. A figure is the median of
interleaved rounds.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np
from server import port_of, read_stream  # beside this file

from duetto import LLM, SamplingParams
from duetto.model.config import ModelConfig
from duetto.sampling.sample import Sampled
from duetto.serve.cli.bench import host_work
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER
from duetto.serve.llm import disaggregated
from duetto.serve.options.server import ServerOptions
from duetto.serve.runtime.steps.output import NO_PROMPT_INPUTS, Output
from duetto.serve.server.http.main import acquire_resources, run_server
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

WAVES = 8  # requests for each seat
AHEAD = 2  # clients for each seat: somebody always waits


class Later:
    """Numbers that a device has at some time."""

    def __init__(self, numbers: np.ndarray, at: float):
        self._numbers, self._at = numbers, at

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        time.sleep(max(self._at - time.perf_counter(), 0))
        return self._numbers


class Busy(host_work.InstantExecutor):
    """Executor of a device that takes `seconds` for each program, one after the other."""

    seconds_each, _free = 0.0, 0.0

    def run(self, shape: Any, arguments: Any, batch: Any, prompt_inputs: Any = NO_PROMPT_INPUTS) -> Any:
        cache, slots, output = super().run(shape, arguments, batch)
        self._free = max(time.perf_counter(), self._free) + self.seconds_each
        tokens: Any = Later(output.sampled.token, self._free)
        return cache, slots, Output(Sampled(tokens, None, None, None, None), None)


def simulated(seats: int, seconds: float) -> LLM:
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    assert tokenizer is not None
    Busy.seconds_each, host_work.InstantExecutor = seconds, Busy
    nothing: Any = {}
    config = ModelConfig.uniform(len(tokenizer), 64, 64, 1, 2, 2, 32, 256)
    disaggregated.start_engine = lambda config, params, options, **_: host_work.make_instant_engine(
        config, params, options, seats
    )
    return LLM.from_params(config, nothing, tokenizer, compilation_cache=None)


def prompts(count: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, 300, (count, host_work.PROMPT_TOKENS)).tolist()


def offline(llm: LLM, count: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=host_work.ANSWER_TOKENS, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts(count), params, use_tqdm=False)
    return time.perf_counter() - begin


def through(port: int, count: int, clients: int) -> float:
    """Seconds of as many streams, read by clients that ask for the next one after each."""
    asked = {"max_tokens": host_work.ANSWER_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    left = iter(prompts(count))

    async def client() -> None:
        for prompt in left:
            await read_stream(port, asked | {"prompt": prompt})

    async def every() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    begin = time.perf_counter()
    asyncio.run(every())
    return time.perf_counter() - begin


@contextlib.contextmanager
def serving(words: list[str]):
    process = subprocess.Popen([sys.executable, *words, "--serve"], stderr=subprocess.PIPE, text=True)
    try:
        yield port_of(process)
    finally:
        process.terminate()
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seats", type=int, default=32)
    parser.add_argument("--step", type=float, default=10.0, help="milliseconds of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    llm, count = simulated(args.seats, args.step / 1000), WAVES * args.seats
    if args.serve:
        options = ServerOptions(port=0, max_queued=4 * count)
        raise SystemExit(run_server(llm, options, {}, acquire_resources(options)))
    with serving(sys.argv) as port:
        ways = {
            "offline": partial(offline, llm, count),
            "served": partial(through, port, count, AHEAD * args.seats),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for round in range(args.rounds + 1):
            for name, run in ways.items():
                seconds = run()
                found[name] += [seconds] if round else []
    ratios = [b / a for a, b in zip(found["offline"], found["served"], strict=True)]
    print("| seats | step ms | offline s | served s | served / offline |\n|---|---|---|---|---|")
    own, others = (statistics.median(found[name]) for name in ways)
    ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
    print(f"| {args.seats} | {args.step:g} | {own:.2f} | {others:.2f} | {ratio} |")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
