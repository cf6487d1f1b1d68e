"""Which replica is the best for a prompt, and what is known of replicas' pages."""

from collections import Counter
from math import sqrt
from random import Random

import pytest

from duetto.serve.kv.routing.placement import (
    HASH_PRIME,
    HOME_LOAD_SHARE,
    TOKENS_PER_ROW,
    Replica,
    RoutedPrompt,
    RoutedRequest,
    choose_replica,
)
from duetto.serve.kv.routing.prefix_index import AssumedPrefixIndex, EventPrefixIndex

NAMES = [bytes([i]) * 16 for i in range(8)]


def test_the_index_keeps_recent_prompts_and_their_first_pages():
    memory = AssumedPrefixIndex(4)
    memory.on_prompt_sent(NAMES[:3])
    assert (
        memory.count_cached(NAMES) == 3
        and memory.count_cached(NAMES[1:]) == 2
        and memory.count_cached(NAMES[4:]) == 0
    )
    memory.on_prompt_sent(NAMES[4:7])
    assert memory.count_cached(NAMES) == 1 and memory.count_cached(NAMES[4:]) == 3
    memory.on_request_ended(NAMES)
    assert memory.count_cached(NAMES[4:]) == 3
    memory.clear()
    assert memory.count_cached(NAMES[4:]) == 0


def test_assumed_pages_count_until_their_request_ends():
    memory = EventPrefixIndex()
    memory.on_prompt_sent(NAMES[:3])
    memory.on_prompt_sent(NAMES[:2])
    memory.on_page_stored(NAMES[0])
    memory.on_request_ended(NAMES[:3])
    assert memory.count_cached(NAMES) == 2
    memory.on_request_ended(NAMES[:2])
    assert memory.count_cached(NAMES) == 1
    memory.on_page_removed(NAMES[0])
    assert memory.count_cached(NAMES) == 0


def replica(address: str = "x") -> Replica:
    made = Replica(address, AssumedPrefixIndex(100))
    made.is_ready = True
    return made


def test_the_longest_prefix_wins_unless_its_replica_is_busy():
    one, two = replica(), replica()
    prompt = RoutedPrompt(NAMES, 64, 8 * 64)
    one.add_request(RoutedRequest(prompt))
    assert one.load == 512 + TOKENS_PER_ROW and two.load == 0
    assert choose_replica([one, two], prompt, 9, ()) is two  # 512 + ROW + 1 there, 512 here
    begun = next(iter(one.requests))
    one.on_prefill_done(begun)
    # ROW + 1 there, 512 here
    assert one.load == TOKENS_PER_ROW and choose_replica([one, two], prompt, 9, ()) is one
    assert choose_replica([one, two], prompt, 1, ()) is two
    assert choose_replica([one, two], prompt, 9, {one}) is two
    two.is_ready = False
    assert choose_replica([one, two], prompt, 1, ()) is None
    one.remove_request(begun)
    one.remove_request(begun)
    assert one.load == 0 and one.hit_tokens == 0 and one.prompt_tokens == 512


def order(own: Replica, name: bytes) -> int:
    return own.salt * int.from_bytes(name[:8]) % HASH_PRIME


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_replica_or_the_home_is_chosen(seed):
    random = Random(seed)
    replicas = [replica(str(i)) for i in range(random.randint(1, 12))]
    for own in replicas:
        own.is_ready = random.random() < 0.9
        for _ in range(random.randrange(4)):
            own.add_request(
                RoutedRequest(RoutedPrompt(NAMES[: random.randrange(8)], 64, random.randrange(520)))
            )
        own.chosen = random.randrange(3)
    prompt = random.choice(
        [RoutedPrompt(), RoutedPrompt(NAMES, 64, 8 * 64), RoutedPrompt(NAMES[:3], 64, 200)]
    )
    but, most = set(random.sample(replicas, len(replicas) // 4)), random.randint(1, 5)
    open = [one for one in replicas if one.is_ready and one not in but and len(one.requests) < most]
    least = min(open, key=lambda one: (one.prefill_cost(prompt), len(one.requests), one.chosen), default=None)
    found = choose_replica(replicas, prompt, most, but)
    known = least.prefix_index.count_cached(prompt.page_hashes) if least else 0
    if least is None or known == len(prompt.page_hashes):
        assert found is least
        return
    alike = [one for one in open if one.prefix_index.count_cached(prompt.page_hashes) >= known]
    idle = min(one.load for one in open)
    if known and least.load - idle > least.cached_tokens(prompt) / sqrt(len(alike)):
        alike = [one for one in open if one not in alike]
        known, limit = 0, min(idle + HOME_LOAD_SHARE * prompt.tokens, least.load)
    else:
        limit = least.load + (prompt.tokens - least.cached_tokens(prompt)) * (1 if known else HOME_LOAD_SHARE)
    alike = [one for one in alike if one.load <= limit]
    assert found is max(alike, key=lambda one: order(one, prompt.page_hashes[known]))


def test_independent_routers_send_new_prefixes_to_the_same_replica():
    routers = [[replica(f"http://r{i}:80") for i in range(5)] for _ in range(2)]
    random, homes = Random(0), Counter[str]()
    for _ in range(500):
        prompt = RoutedPrompt([random.randbytes(16) for _ in range(8)], 64, 8 * 64)
        one, other = (choose_replica(replicas, prompt, 9, ()) for replicas in routers)
        assert one is not None and other is not None and one.address == other.address
        homes[one.address] += 1
        more = RoutedPrompt([*prompt.page_hashes, random.randbytes(16)], 64, 9 * 64)
        one.add_request(job := RoutedRequest(prompt))
        one.remove_request(job)
        assert choose_replica(routers[0], more, 9, ()) is one  # known there
        assert choose_replica(routers[1], more, 9, ()) is other  # guessed
    assert min(homes.values()) > 60 and len(homes) == 5


def test_a_home_that_is_much_busier_is_not_chosen():
    replicas = [replica(str(i)) for i in range(3)]
    prompt = RoutedPrompt(NAMES, 64, 8 * 64)
    first = choose_replica(replicas, prompt, 9, ())
    assert first is not None
    first.add_request(RoutedRequest(RoutedPrompt((), 64, int(HOME_LOAD_SHARE * 512) - TOKENS_PER_ROW)))
    assert choose_replica(replicas, prompt, 9, ()) is first
    first.add_request(RoutedRequest(RoutedPrompt()))
    assert choose_replica(replicas, prompt, 9, ()) is not first


def loaded(replicas: list[Replica], tokens: int) -> None:
    for one in replicas:
        one.add_request(RoutedRequest(RoutedPrompt((), 64, tokens - TOKENS_PER_ROW)))


def test_a_busy_prefix_is_copied_to_another_replica():
    """Each router makes the copies in the order of the hashes of the first page."""
    routers = [[replica(f"http://r{i}:80") for i in range(9)] for _ in range(2)]
    prompt = RoutedPrompt(NAMES, 64, 8 * 64)
    wanted = sorted(routers[0], key=lambda one: -order(one, NAMES[0]))
    for replicas in routers:
        by_address = {one.address: one for one in replicas}
        ranked = [by_address[one.address] for one in wanted]
        for count in range(1, 9):
            for one in ranked[:count]:
                one.prefix_index.on_prompt_sent(NAMES[:4])
            loaded(ranked[:count], int(256 / sqrt(count)))
            assert choose_replica(replicas, prompt, 9, ()) in ranked[:count]
            loaded(ranked[:count], TOKENS_PER_ROW + 1)
            assert choose_replica(replicas, prompt, 9, ()) is ranked[count]
            for one in ranked[:count]:
                for job in [*one.requests]:
                    one.remove_request(job)


def test_a_copy_of_a_prefix_goes_to_no_busier_replica():
    """Whatever the hash of the first page prefers."""
    prompt, (one, two, idle, *others) = (
        RoutedPrompt(NAMES[1:], 64, 7 * 64),
        [replica(str(i)) for i in range(40)],
    )
    for known in (one, two):
        known.prefix_index.on_prompt_sent(NAMES[1:3])
    loaded([one, two], 100)
    loaded(others, 110)
    assert choose_replica([one, two, idle, *others], prompt, 9, ()) is idle


def test_later_pages_alone_make_no_replica_the_best():
    one, two = replica("1"), replica("2")
    one.prefix_index.on_prompt_sent(NAMES[:4])
    two.prefix_index.on_prompt_sent(NAMES[3:4])
    loaded([one], 240)
    assert choose_replica([one, two], RoutedPrompt(NAMES, 64, 8 * 64), 9, ()) is two
