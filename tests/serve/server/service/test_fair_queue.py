"""Whose request is next."""

from duetto.serve.server.service.fair_queue import MAX_CLIENTS, FairQueue


def test_many_requests_do_not_delay_another_client():
    shares = FairQueue()
    many = [shares.assign_position("a", 100) for _ in range(50)]
    one = shares.assign_position("b", 100)
    assert sorted([*many, one]).index(one) <= 1


def test_idle_clients_accumulate_no_credit():
    shares = FairQueue()
    for _ in range(10):
        shares.on_served(shares.assign_position("a", 100))
    idle = [shares.assign_position("b", 100) for _ in range(5)]
    busy = [shares.assign_position("a", 100) for _ in range(5)]
    assert min(idle) >= 900 and abs(max(idle) - max(busy)) <= 100


def test_shares_follow_tokens():
    shares = FairQueue()
    dear = [shares.assign_position("a", 300) for _ in range(10)]
    cheap = [shares.assign_position("b", 100) for _ in range(30)]
    served = sorted([*((x, "a") for x in dear), *((x, "b") for x in cheap)])[:20]
    assert 4 <= sum(who == "a" for _, who in served) <= 6


def test_memory_is_bounded():
    shares = FairQueue()
    for i in range(MAX_CLIENTS + 100):
        shares.assign_position(str(i), 1)
    assert len(shares._ends) == MAX_CLIENTS
