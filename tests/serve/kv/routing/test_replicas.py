"""Which replica is the best for a prompt, and what is known of replicas' pages."""

from collections import Counter
from math import sqrt
from random import Random

import pytest

from duetto.serve.kv.routing.placement import PRIME, ROW, SPARE, Prompt, Replica, RoutedRequest, best
from duetto.serve.kv.routing.prefix_index import AssumedPrefixIndex, EventPrefixIndex

NAMES = [bytes([i]) * 16 for i in range(8)]


def test_pages_that_were_sent_last_stay_and_of_a_prompt_the_first():
    memory = AssumedPrefixIndex(4)
    memory.sent(NAMES[:3])
    assert memory.hits(NAMES) == 3 and memory.hits(NAMES[1:]) == 2 and memory.hits(NAMES[4:]) == 0
    memory.sent(NAMES[4:7])
    assert memory.hits(NAMES) == 1 and memory.hits(NAMES[4:]) == 3
    memory.ended(NAMES)
    assert memory.hits(NAMES[4:]) == 3
    memory.forget()
    assert memory.hits(NAMES[4:]) == 0


def test_what_is_on_its_way_is_there_until_it_ends():
    memory = EventPrefixIndex()
    memory.sent(NAMES[:3])
    memory.sent(NAMES[:2])
    memory.stored(NAMES[0])
    memory.ended(NAMES[:3])
    assert memory.hits(NAMES) == 2
    memory.ended(NAMES[:2])
    assert memory.hits(NAMES) == 1
    memory.removed(NAMES[0])
    assert memory.hits(NAMES) == 0


def replica(address: str = "x") -> Replica:
    made = Replica(address, AssumedPrefixIndex(100))
    made.is_ready = True
    return made


def test_the_longest_prefix_wins_unless_its_replica_is_busier_by_more_than_that_saves():
    one, two = replica(), replica()
    prompt = Prompt(NAMES, 64, 8 * 64)
    one.take(RoutedRequest(prompt))
    assert one.load == 512 + ROW and two.load == 0
    assert best([one, two], prompt, 9, ()) is two  # 512 + ROW + 1 there, 512 here
    begun = next(iter(one.jobs))
    one.begun(begun)
    assert one.load == ROW and best([one, two], prompt, 9, ()) is one  # ROW + 1 there, 512 here
    assert best([one, two], prompt, 1, ()) is two and best([one, two], prompt, 9, {one}) is two
    two.is_ready = False
    assert best([one, two], prompt, 1, ()) is None
    one.leave(begun)
    one.leave(begun)
    assert one.load == 0 and one.hit_tokens == 0 and one.prompt_tokens == 512


def order(own: Replica, name: bytes) -> int:
    return own.salt * int.from_bytes(name[:8]) % PRIME


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_many_has_the_least_cost_or_is_the_home_of_what_none_of_them_knows(seed):
    random = Random(seed)
    replicas = [replica(str(i)) for i in range(random.randint(1, 12))]
    for own in replicas:
        own.is_ready = random.random() < 0.9
        for _ in range(random.randrange(4)):
            own.take(RoutedRequest(Prompt(NAMES[: random.randrange(8)], 64, random.randrange(520))))
        own.chosen = random.randrange(3)
    prompt = random.choice([Prompt(), Prompt(NAMES, 64, 8 * 64), Prompt(NAMES[:3], 64, 200)])
    but, most = set(random.sample(replicas, len(replicas) // 4)), random.randint(1, 5)
    open = [one for one in replicas if one.is_ready and one not in but and len(one.jobs) < most]
    least = min(open, key=lambda one: (one.cost(prompt), len(one.jobs), one.chosen), default=None)
    found = best(replicas, prompt, most, but)
    known = least.memory.hits(prompt.names) if least else 0
    if least is None or known == len(prompt.names):
        assert found is least
        return
    alike = [one for one in open if one.memory.hits(prompt.names) >= known]
    idle = min(one.load for one in open)
    if known and least.load - idle > least.hits(prompt) / sqrt(len(alike)):
        alike = [one for one in open if one not in alike]
        known, limit = 0, min(idle + SPARE * prompt.tokens, least.load)
    else:
        limit = least.load + (prompt.tokens - least.hits(prompt)) * (1 if known else SPARE)
    alike = [one for one in alike if one.load <= limit]
    assert found is max(alike, key=lambda one: order(one, prompt.names[known]))


def test_routers_that_share_nothing_begin_a_prefix_in_the_same_replica():
    routers = [[replica(f"http://r{i}:80") for i in range(5)] for _ in range(2)]
    random, homes = Random(0), Counter[str]()
    for _ in range(500):
        prompt = Prompt([random.randbytes(16) for _ in range(8)], 64, 8 * 64)
        one, other = (best(replicas, prompt, 9, ()) for replicas in routers)
        assert one is not None and other is not None and one.address == other.address
        homes[one.address] += 1
        more = Prompt([*prompt.names, random.randbytes(16)], 64, 9 * 64)
        one.take(job := RoutedRequest(prompt))
        one.leave(job)
        assert best(routers[0], more, 9, ()) is one  # known there
        assert best(routers[1], more, 9, ()) is other  # guessed
    assert min(homes.values()) > 60 and len(homes) == 5


def test_a_home_that_is_busier_by_more_than_a_share_of_the_prompt_is_left_out():
    replicas = [replica(str(i)) for i in range(3)]
    prompt = Prompt(NAMES, 64, 8 * 64)
    first = best(replicas, prompt, 9, ())
    assert first is not None
    first.take(RoutedRequest(Prompt((), 64, int(SPARE * 512) - ROW)))
    assert best(replicas, prompt, 9, ()) is first
    first.take(RoutedRequest(Prompt()))
    assert best(replicas, prompt, 9, ()) is not first


def loaded(replicas: list[Replica], tokens: int) -> None:
    for one in replicas:
        one.take(RoutedRequest(Prompt((), 64, tokens - ROW)))


def test_a_prefix_that_several_replicas_have_gets_another_before_all_wait_for_as_long_as_it_takes():
    """Each router makes the copies in the order of the hashes of the first page."""
    routers = [[replica(f"http://r{i}:80") for i in range(9)] for _ in range(2)]
    prompt = Prompt(NAMES, 64, 8 * 64)
    wanted = sorted(routers[0], key=lambda one: -order(one, NAMES[0]))
    for replicas in routers:
        by_address = {one.address: one for one in replicas}
        ranked = [by_address[one.address] for one in wanted]
        for count in range(1, 9):
            for one in ranked[:count]:
                one.memory.sent(NAMES[:4])
            loaded(ranked[:count], int(256 / sqrt(count)))
            assert best(replicas, prompt, 9, ()) in ranked[:count]
            loaded(ranked[:count], ROW + 1)
            assert best(replicas, prompt, 9, ()) is ranked[count]
            for one in ranked[:count]:
                for job in [*one.jobs]:
                    one.leave(job)


def test_a_copy_of_a_prefix_goes_to_no_busier_replica():
    """Whatever the hash of the first page prefers."""
    prompt, (one, two, idle, *others) = Prompt(NAMES[1:], 64, 7 * 64), [replica(str(i)) for i in range(40)]
    for known in (one, two):
        known.memory.sent(NAMES[1:3])
    loaded([one, two], 100)
    loaded(others, 110)
    assert best([one, two, idle, *others], prompt, 9, ()) is idle


def test_a_replica_that_has_a_page_without_those_before_it_may_be_the_least_busy():
    one, two = replica("1"), replica("2")
    one.memory.sent(NAMES[:4])
    two.memory.sent(NAMES[3:4])
    loaded([one], 240)
    assert best([one, two], Prompt(NAMES, 64, 8 * 64), 9, ()) is two
