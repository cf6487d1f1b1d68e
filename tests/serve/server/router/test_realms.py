"""Answers whose replica is lost, where replicas have different weights: no answer is of two models."""

import json

import pytest
from fakes.replica import FakeReplica

from duetto.serve.server.router.resumable import ResumableStream

WHOLE = [str(i) for i in range(6)]


def lose(*fakes: FakeReplica, after: int = 3) -> None:
    for fake in fakes:
        fake.dies_after = after


def words_of(text: str) -> list[str]:
    events = [json.loads(part[6:]) for part in text.split("\n\n") if part.startswith("data: {")]
    return [event["choices"][0]["text"].strip() for event in events if "choices" in event]


def test_a_stream_does_not_go_on_with_other_weights(routing, capfd):
    async def test(router):
        first, second = router.fakes
        lose(first)
        first.comes_back = False
        second.realm = "two"
        await router.until(lambda: router.replicas[1].realm == "two")
        text = await router.words()
        if not first.asked:
            text = await router.words()
        assert words_of(text) == WHOLE[:3] and "no other has the weights" in text
        assert text.endswith("\n\n") and "[DONE]" not in text
        refused = [asked["resume"] for asked in second.asked if asked["resume"]["outputs"]]
        assert [(one["realm"], one["outputs"]) for one in refused] == [("one", [[0, 1, 2]])]

    routing(test)
    told = capfd.readouterr().err
    assert "does not go on with another's answer: other weights" in told
    assert "a stream ends with an error" in told and "is ready, of realm two" in told


def test_a_stream_goes_on_in_the_replica_that_fits(routing):
    async def test(router):
        for fake, realm in zip(router.fakes, ("one", "two", "two", "two", "one"), strict=True):
            fake.realm = realm
        await router.until(lambda: router.replicas[3].realm == "two")
        lose(router.fakes[0])
        for _ in range(5):
            assert words_of(await router.words()) == WHOLE
            await router.until(lambda: all(one.is_ready for one in router.replicas))
        assert router.fakes[0].asked and router.proxy.num_resumed
        resumed = [one for one in router.fakes if any(asked["resume"]["outputs"] for asked in one.asked)]
        assert resumed == [router.fakes[4]]

    routing(test, count=5)


@pytest.mark.parametrize("known, now", [("one", "two"), ("two", "one")])
def test_a_replicas_realm_may_be_outdated(routing, known, now):
    """Each is asked then, also more of them than there are attempts."""

    async def test(router):
        for replica in router.replicas[1:]:
            replica.realm = known
        for fake in router.fakes[1:4]:
            fake.realm = now
        lose(router.fakes[0])
        for _ in range(5):
            assert words_of(await router.words()) == WHOLE
            router.replicas[0].is_ready = True
        assert router.fakes[0].asked and router.proxy.num_resumed == len(router.fakes[0].asked)

    routing(test, count=5, health_period=60.0, max_attempts=2)


@pytest.mark.parametrize("realm", ["one", ""])
def test_a_whole_answer_begins_anew_where_no_replica_fits(routing, realm):
    async def test(router):
        first, second = router.fakes
        first.realm, second.realm = realm, "two"
        lose(first)
        first.comes_back = False  # else it goes on itself
        for _ in range(2):
            reply = await router.client.post("/v1/completions", json={"prompt": "x"})
            assert reply.json() == {"said": list(range(6))}
        assert first.asked
        begun = [asked for asked in second.asked if not asked["resume"]["outputs"]]
        assert len(begun) == 2

    routing(test, health_period=60.0)


def test_tokens_of_no_realm_are_not_continued(routing):
    async def test(router):
        for fake in router.fakes:
            fake.realm = ""
        lose(router.fakes[0])
        texts = [await router.words() for _ in range(2)]
        assert sorted(map(len, map(words_of, texts))) == [3, 6]
        assert any("went away" in text for text in texts)

    routing(test)


def test_adapters_of_one_name_may_differ(routing):
    async def test(router):
        first, second = router.fakes
        first.realm, second.realm = "one adapter", "one other"
        lose(first)
        first.comes_back = False
        texts = [await router.words() for _ in range(2)]
        assert sorted(map(len, map(words_of, texts))) == [3, 6]
        known = [asked["resume"]["realm"] for asked in second.asked if asked["resume"]["outputs"]]
        assert known == ["one adapter"]

    routing(test)


def test_the_realm_of_the_latest_tokens_counts():
    stream = ResumableStream({"stream": True}, b"{}")
    for comments in (b': realm one\n\n: tokens {"0": [1]}\n\n', b': realm two\n\n: tokens {"0": [2]}\n\n'):
        assert stream.feed(b"data: x\n\n" + comments) == b"data: x\n\n"
    known = json.loads(stream.next_body)["resume"]
    assert (known["realm"], known["outputs"], known["events"]) == ("two", [[1, 2]], 2)
