"""Which engine computes the prompt of a request that another one answers."""

import asyncio
import re

import pytest

from duetto.serve.kv.routing.placement import RoutedPrompt, RoutedRequest, choose_replica
from duetto.serve.options.router import RouterOptions

LONG = "def add(a, b): return a + b  " * 40  # some 290 tokens
PAIRS = {"count": 2, "prefills": 2, "page_size": 16}


def chosen(fake) -> list[str]:
    """The prefill engines that a replica was told of."""
    return [place for head in fake.headers for place in re.findall(r"x-duetto-prefill: (\S+)", head)]


def all_chosen(router) -> list[str]:
    return [place for fake in router.fakes for place in chosen(fake)]


def test_the_prefill_engine_that_has_the_prefix_is_chosen(routing):
    async def test(router):
        prompt = router.proxy.page_hasher("/v1/completions", {"prompt": LONG})
        first = choose_replica(router.prefills.replicas, prompt, 9, ())  # none has it
        first.add_request(other := RoutedRequest(RoutedPrompt(tokens=10_000)))
        await router.words(prompt=LONG)
        first.remove_request(other)
        assert all_chosen(router) == [f"p:{1 - router.prefills.replicas.index(first)}"]
        for replica in router.line.replicas:  # those that answer know nothing of it any more
            replica.prefix_index.clear()
        await router.words(prompt=LONG + "more")
        assert len(all_chosen(router)) == 2 and len({*all_chosen(router)}) == 1
        assert not any(fake.asked for fake in router.fakes[2:])
        assert all(one.load == 0 for one in router.replicas)

    routing(test, **PAIRS)


def test_a_busy_prefill_engine_is_skipped(routing):
    async def test(router):
        for fake in router.fakes[:2]:
            fake.going.clear()
        asked = [asyncio.create_task(router.words(prompt=LONG + str(i))) for i in range(2)]
        await router.until(lambda: len(all_chosen(router)) == 2)
        assert sorted(all_chosen(router)) == ["p:0", "p:1"]
        assert all(one.load > 200 for one in router.prefills.replicas)
        for fake in router.fakes[:2]:
            fake.going.set()
        await asyncio.gather(*asked)

    routing(test, **PAIRS)


def test_without_prefill_engines_replicas_compute_prompts(routing):
    async def test(router):
        router.fakes[2].is_ready = router.fakes[3].is_alive = False
        first, second = router.prefills.replicas
        await router.until(lambda: not first.is_ready and not second.is_up)
        await router.words(prompt=LONG)
        router.fakes[2].is_ready = True
        await router.until(lambda: first.is_ready)
        await router.words(prompt="x = 1\n" * 40)
        assert all_chosen(router) == ["p:0"]
        for fake in router.fakes[:2]:
            fake.is_ready = False
        await router.until(lambda: not any(one.is_ready for one in router.line.replicas))
        assert (await router.client.get("/ready")).status_code == 503

    routing(test, health_timeout=0.5, **PAIRS)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize"])
def test_only_what_generates_is_prefilled_elsewhere(routing, path):
    async def test(router):
        await router.client.post(path, json={"prompt": LONG, "input": LONG})
        await router.words(prompt="short")
        assert all_chosen(router) == []

    routing(test, **PAIRS)


def test_prompts_of_a_full_page_are_prefilled_elsewhere(routing):
    async def test(router):
        for tokens in (15, 16):
            await router.words(prompt=list(range(tokens)))
            assert len(all_chosen(router)) == (tokens == 16)

    routing(test, **PAIRS)


def test_clients_name_no_prefill_engine(routing):
    async def test(router):
        body, named = {"prompt": LONG}, {"x-duetto-prefill": "evil:1"}
        for _ in range(2):  # a prompt that is there needs none
            await router.client.post("/v1/completions", json=body, headers=named)
        assert all_chosen(router) == ["p:0"]

    routing(test, count=1, prefills=1, page_size=16)


WRONG = [
    ("http://a", "prefill 'http://a' is not allowed: http"),
    ("http://a=b", "prefill 'http://a=b' is not allowed: http"),
    ("a=b:1", "prefill 'a=b:1' is not allowed: http"),
    ("http://r=b:1", "each has another address"),
]


@pytest.mark.parametrize("pair, message", WRONG)
def test_pairs_that_are_not_allowed_are_named(pair, message):
    with pytest.raises(ValueError, match=message):
        RouterOptions(replica=["http://r"], prefill=[pair])
