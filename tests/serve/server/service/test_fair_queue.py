"""Whose request is next."""

from duetto.serve.server.service.fair_queue import CLIENTS, FairQueue


def test_one_who_sends_many_does_not_delay_another():
    shares = FairQueue()
    many = [shares.place("a", 100) for _ in range(50)]
    one = shares.place("b", 100)
    assert sorted([*many, one]).index(one) <= 1


def test_who_was_idle_saves_nothing_up():
    shares = FairQueue()
    for _ in range(10):
        shares.served(shares.place("a", 100))
    idle = [shares.place("b", 100) for _ in range(5)]
    busy = [shares.place("a", 100) for _ in range(5)]
    assert min(idle) >= 900 and abs(max(idle) - max(busy)) <= 100


def test_shares_follow_tokens():
    shares = FairQueue()
    dear = [shares.place("a", 300) for _ in range(10)]
    cheap = [shares.place("b", 100) for _ in range(30)]
    served = sorted([*((x, "a") for x in dear), *((x, "b") for x in cheap)])[:20]
    assert 4 <= sum(who == "a" for _, who in served) <= 6


def test_memory_is_bounded():
    shares = FairQueue()
    for i in range(CLIENTS + 100):
        shares.place(str(i), 1)
    assert len(shares._ends) == CLIENTS
