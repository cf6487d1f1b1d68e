"""Requests beside others whose grammars are costly to compile."""

import asyncio
import time
from collections.abc import Sequence

import pytest
from cases.requests import SIZES, SMALLEST

from duetto import LLM, SamplingParams
from duetto.sampling.structured import StructuredOutputsParams
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.service.errors import HttpError
from duetto.serve.server.service.service import Service
from duetto.serve.text.openai.errors import RequestError
from duetto.serve.text.openai.tasks import Task

PRIMES = (999979, 999983, 999961, 999959, 999953, 999931, 999917, 999907)


@pytest.fixture(scope="module")
def llm():
    with LLM(SMALLEST, **SIZES, background_compilation=False, max_prefill_delay=0.0) as own:
        yield own


def task(n: int | None = None, words: Sequence[str] = ()) -> Task:
    asked = None if n is None else StructuredOutputsParams(json={"type": "integer", "multipleOf": n})
    asked = StructuredOutputsParams(choice=words) if words else asked
    params = SamplingParams(max_tokens=16, temperature=0.0, structured_outputs=asked)
    return Task("completion", None, params, prompt="def f(x):")


async def seconds(service: Service, one: Task) -> float:
    began = time.monotonic()
    async with service.open_call([one], service.admission.new_body()) as call:
        await service.answer_call(call, lambda outputs: outputs)
    return time.monotonic() - began


@pytest.mark.full
def test_a_flood_of_costly_grammars_delays_no_other_request(llm):
    """It took more than the time of all of them; each is refused by the option's name."""

    async def served() -> tuple[list[float], float, Sequence[object]]:
        service = Service(llm, ServerOptions(), {})
        await seconds(service, task())
        began = time.monotonic()
        flood = [asyncio.ensure_future(seconds(service, task(n))) for n in PRIMES]
        await asyncio.sleep(0.2)
        plain = [await seconds(service, task()) for _ in range(3)]
        plain.append(await seconds(service, task(words=["yes", "no"])))
        over = [one.done() for one in flood]
        refused = await asyncio.gather(*flood, return_exceptions=True)
        await service.close()
        assert not all(over)
        return plain, time.monotonic() - began, refused

    plain, whole, refused = asyncio.run(served())
    for error in refused:
        assert isinstance(error, RequestError) and error.param == "structured_outputs"
        assert "max_grammar_" in str(error)
    assert max(plain[:3]) < whole / 4, (plain, whole)


@pytest.mark.full
def test_the_longest_wait_counts_from_the_arrival(llm):
    """A grammar for which no request waits any more is compiled no further."""

    async def served() -> None:
        service = Service(llm, ServerOptions(queue_timeout=0.5), {})
        flood = [asyncio.ensure_future(seconds(service, task(n))) for n in PRIMES[:4]]
        began = time.monotonic()
        found = await asyncio.gather(*flood, return_exceptions=True)
        assert time.monotonic() - began < 60
        late = [one for one in found if isinstance(one, HttpError)]
        assert late and all(one.status == 503 and "within 0.5 s" in str(one) for one in late)
        while llm.input_processor.grammars.jobs:
            await asyncio.sleep(0.01)
        await service.close()

    asyncio.run(asyncio.wait_for(served(), 300))


def test_a_client_that_leaves_ends_the_work_for_it(llm):
    async def served() -> None:
        service = Service(llm, ServerOptions(), {})
        waiting = asyncio.ensure_future(seconds(service, task(PRIMES[0])))
        while not llm.input_processor.grammars.jobs:
            await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while llm.input_processor.grammars.jobs:
            await asyncio.sleep(0.01)
        assert not service._tokenizing and not service._num_calls
        await service.close()

    asyncio.run(asyncio.wait_for(served(), 300))
