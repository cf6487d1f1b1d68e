"""Which replica is the best for a prompt, and what is known of replicas' pages."""

from random import Random

import pytest

from duetto.serve.kv.routing.placement import ROW, Prompt, Replica, RoutedRequest, best
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


def replica() -> Replica:
    made = Replica("x", AssumedPrefixIndex(100))
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


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_many_is_the_first_with_the_least_cost(seed):
    random = Random(seed)
    replicas = [replica() for _ in range(random.randint(1, 12))]
    for own in replicas:
        own.is_ready = random.random() < 0.9
        for _ in range(random.randrange(4)):
            own.take(RoutedRequest(Prompt(NAMES[: random.randrange(8)], 64, random.randrange(520))))
        own.chosen = random.randrange(3)
    prompt = random.choice([Prompt(), Prompt(NAMES, 64, 8 * 64), Prompt(NAMES[:3], 64, 200)])
    but, most = set(random.sample(replicas, len(replicas) // 4)), random.randint(1, 5)
    open = [one for one in replicas if one.is_ready and one not in but and len(one.jobs) < most]
    least = min(open, key=lambda one: (one.cost(prompt), len(one.jobs), one.chosen), default=None)
    assert best(replicas, prompt, most, but) is least
