"""Requests through a router: where they go, and what becomes of them where a replica fails."""

import asyncio
import errno
import json
import re
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest

from duetto.serve.kv.routing.placement import Replica, RoutedPrompt, RoutedRequest
from duetto.serve.kv.routing.prefix_index import AssumedPrefixIndex
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.router.proxy import parse_body_fields
from duetto.serve.server.router.request_queue import RequestQueue
from duetto.serve.server.service.errors import HttpError

WHOLE = [str(i) for i in range(6)]


def said(text: str) -> list[str]:
    """The words of a stream, of which each event is whole and all are of one answer."""
    events = [part[6:] for part in text.split("\n\n") if part.startswith("data: {")]
    assert text.endswith("data: [DONE]\n\n") and len({json.loads(event)["id"] for event in events}) == 1
    assert not any(comment in text for comment in (": tokens", ": realm", ": end"))
    return [json.loads(event)["choices"][0]["text"].strip() for event in events]


@pytest.mark.parametrize("dies_after", range(7))
def test_a_stream_goes_on_elsewhere_from_its_tokens(routing, dies_after):
    async def test(router):
        for fake in router.fakes:
            fake.dies_after = dies_after
        router.fakes[1].dies_after = None
        for _ in range(2):  # one of them begins at the first
            assert said(await router.words()) == WHOLE
        first, second = router.fakes
        if dies_after < 6:
            known = [asked["resume"]["outputs"] for asked in second.asked if asked["resume"]["outputs"]]
            assert known == [[list(range(dies_after))]] * len(known) and bool(known) == bool(dies_after)
            assert router.proxy.num_resumed == len(first.asked) > 0 and len(second.asked) == 2
            assert router.replicas[0].load == router.replicas[1].load == 0

    routing(test)


def test_invalid_bodies_are_forwarded_unchanged():
    """Of a key that stands there twice the router chooses none."""
    assert parse_body_fields(b'{"prompt": "x", "max_tokens": 1, "max_tokens": 2}') == {}
    assert parse_body_fields(b"[1]") == parse_body_fields(b"{") == parse_body_fields(b"") == {}
    assert parse_body_fields(b'{"prompt": "x"}') == {"prompt": "x"}


@pytest.mark.parametrize("dies_after", range(7))
def test_a_whole_answer_goes_on_elsewhere_from_its_tokens(routing, dies_after):
    async def test(router):
        router.fakes[0].dies_after = dies_after
        for _ in range(2):
            reply = await router.client.post("/v1/completions", json={"prompt": "x"})
            assert reply.json() == {"said": list(range(6))}
            assert reply.headers["content-type"] == "application/json"
        first, second = router.fakes
        if dies_after < 6:
            known = [asked["resume"]["outputs"] for asked in second.asked if asked["resume"]["outputs"]]
            assert known == [[list(range(dies_after))]] * len(known) and bool(known) == bool(dies_after)
            assert router.proxy.num_resumed + router.proxy.num_retried == len(first.asked) > 0
            assert bool(router.proxy.num_resumed) == bool(dies_after)

    routing(test)


def test_a_replica_that_hangs_is_lost(routing):
    async def test(router):
        router.fakes[0].hangs_after = 3
        both = await asyncio.gather(router.words(), router.words())
        assert [said(text) for text in both] == [WHOLE, WHOLE]
        assert not router.replicas[0].is_up and router.replicas[0].lost == 1
        router.fakes[0].is_alive = True
        router.fakes[0].hangs_after = None
        await router.until(lambda: router.replicas[0].is_ready)

    routing(test, health_timeout=2.0)


def test_an_answer_ends_with_its_last_event(routing):
    """A replica that is lost, or hangs, once its answer is whole costs the client nothing."""

    async def test(router):
        for fake in router.fakes:
            fake.ends = False
        async with asyncio.timeout(10):
            assert said(await router.words()) == WHOLE
            reply = await router.client.post("/v1/completions", json={"prompt": "x"})
            assert reply.json() == {"said": list(range(6))}
        assert router.proxy.num_resumed == router.proxy.num_retried == 0
        assert all(not replica.requests for replica in router.replicas)

    routing(test)


def test_requests_without_output_are_sent_again(routing):
    async def test(router):
        for fake in router.fakes[:2]:
            fake.dies_after = 0
        router.fakes[2].tells = False
        for path in ("/v1/completions", "/v1/embeddings", "/tokenize"):
            reply = await router.client.post(path, json={"prompt": "x", "input": "x"})
            assert reply.json() == {"said": path}
            await router.until(lambda: all(one.is_ready for one in router.replicas))
        assert (await router.client.get("/v1/models/a%2Fb?x=1")).json() == {"said": "/v1/models/a%2Fb?x=1"}

    routing(test, count=3)


def test_streams_that_cannot_resume_end_with_an_error(routing):
    async def test(router):
        router.fakes[0].dies_after = 1
        text = await router.words()
        events = [json.loads(part[6:]) for part in text.split("\n\n") if part.startswith("data: ")]
        assert (
            "went away" in events[-1]["error"]["message"]
            and len(events) == 1 + router.proxy.options.max_attempts
        )
        reply = await router.client.post("/v1/completions", json={"prompt": "x"})
        assert reply.status_code == 502 and reply.json()["error"]["code"] == "replica_lost"

    routing(test, count=1)


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
GARBAGE = {
    "bytes": b"\x00\xff" * 5000,
    "status 999": b"HTTP/1.1 999 No\r\ncontent-length: 2\r\n\r\n{}",
    "status 101": b"HTTP/1.1 101 No\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n{}",
    "long head": b"HTTP/1.1 200 OK\r\n" + b"x-a: %s\r\n" % (b"a" * 4000) * 200 + b"content-length: 0\r\n\r\n",
    "no tokens": STREAM + b"data: {}\n\n: tokens x\n\n",
    "choice -1": STREAM + b'data: {}\n\n: tokens {"-1":[1]}\n\n',
    "choice 10^12": STREAM + b'data: {}\n\n: tokens {"1000000000000":[1]}\n\n',
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_replica_that_answers_garbage_is_lost(routing, garbage, is_stream):
    async def test(router):
        router.fakes[0].garbage = router.fakes[1].garbage = [garbage]
        reply = await router.client.post("/v1/completions", json={"prompt": "x", "stream": is_stream})
        assert reply.status_code == 200 and not router.fakes[0].garbage
        assert said(reply.text) == WHOLE if is_stream else reply.json()["said"] == [*range(6)]

    routing(test)


JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
LONG = b"a" * (1 << 20)
TOO_LONG = {
    "whole": (True, JSON, LONG),
    "whole, as an event": (True, STREAM, b"data: " + LONG),
    "whole, of many comments": (True, STREAM, b": ping\n\n" * (1 << 17)),
    "stream, event": (True, STREAM, b"data: " + LONG),
    "stream, events": (True, STREAM, b"data: {}\n\n" * (1 << 17)),
    "whole, not resumable": (False, JSON, LONG),
    "stream, not resumable": (False, STREAM, b"data: " + LONG),
}


@pytest.mark.parametrize("case", TOO_LONG)
def test_an_answer_that_is_too_long_is_asked_for_once(routing, monkeypatch, case):
    """Its replica is well, and another would answer the same."""
    monkeypatch.setattr("duetto.serve.server.router.http_client.MAX_ANSWER_BYTES", 1 << 16)
    (resume, head, text), is_stream = TOO_LONG[case], case.startswith("stream")

    async def test(router):
        for fake in router.fakes:
            fake.garbage = [head + text]
        reply = await router.client.post("/v1/completions", json={"prompt": "x", "stream": is_stream})
        assert reply.status_code == 200 if is_stream else 502
        error = json.loads(reply.text.split("data: ")[-1])["error"]
        assert error["code"] == "answer_too_long" and error["message"].endswith("more than 65536 bytes")
        assert sum(len(fake.asked) for fake in router.fakes) == 1
        assert all(one.is_ready and not one.lost and not one.load for one in router.replicas)

    routing(test, health_period=60.0, resume=resume)


def test_without_resume_streams_are_passed_on_as_they_are(routing):
    async def test(router):
        assert said(await router.words()) == WHOLE
        assert all("resume" not in asked for fake in router.fakes for asked in fake.asked)
        router.fakes[0].dies_after = router.fakes[1].dies_after = 2
        assert "went away" in (text := await router.words()) and len(re.findall("data: ", text)) == 3

    routing(test, resume=False)


def test_a_busy_replica_is_skipped(routing):
    async def test(router):
        router.fakes[0].status = 429
        for _ in range(3):
            assert said(await router.words()) == WHOLE
        router.fakes[1].status = 503
        reply = await router.client.post("/v1/completions", json={"prompt": "x"})
        assert reply.status_code in (429, 503) and reply.json() == {"error": {"message": "no"}}

    routing(test)


def test_a_replica_that_drains_gets_nothing_new(routing):
    async def test(router):
        router.fakes[0].going.clear()
        under_way = asyncio.create_task(router.words(prompt="begun before"))
        await router.until(lambda: bool(router.fakes[0].asked or router.fakes[1].asked))
        router.fakes[0].is_ready = False
        await router.until(lambda: not router.replicas[0].is_ready)
        for _ in range(3):
            await router.words()
        assert len(router.fakes[1].asked) >= 3 and router.replicas[0].is_up
        assert (await router.client.get("/ready")).status_code == 200
        router.fakes[0].going.set()
        assert said(await under_way) == WHOLE
        router.fakes[1].is_ready = False
        await router.until(lambda: not router.replicas[1].is_ready)
        assert (await router.client.get("/ready")).status_code == 503
        assert (await router.client.get("/health")).status_code == 200

    routing(test)


def test_a_prompt_goes_to_its_prefix_unless_that_is_busy(routing):
    async def test(router):
        text = "def add(a, b): return a + b  " * 40  # some 290 tokens
        await router.words(prompt=text)
        (home,) = (fake for fake in router.fakes if fake.asked)
        (other,) = (fake for fake in router.fakes if not fake.asked)
        await router.words(prompt="something else")
        await router.words(prompt=text + "more")
        assert len(home.asked) == 2 and len(other.asked) == 1
        home.going.clear()
        busy = [asyncio.create_task(router.words(prompt=text + f"{i}")) for i in range(12)]
        await router.until(lambda: len(home.asked) + len(other.asked) == 15)
        assert len(home.asked) > len(other.asked) > 1  # seven are as much as the prefix saves
        home.going.set()
        await asyncio.gather(*busy)
        counts = (await router.client.get("/metrics")).text
        assert "duetto:router_hit_tokens_total" in counts and 'duetto:router_replica_load{replica="' in counts

    routing(test, page_size=16)


@pytest.mark.parametrize("isolation, hits", [("key", [0, 0, 288, 288]), ("none", [0, 288, 288, 288])])
def test_an_isolated_keys_prompts_are_routed_by_its_own(routing, isolation, hits):
    text = "def add(a, b): return a + b  " * 40  # 290 tokens by their characters

    async def test(router):
        found = []
        for key in ("first", "second", "first", "second"):
            before = sum(one.hit_tokens for one in router.replicas)
            body, headers = {"prompt": text}, {"authorization": f"Bearer {key}"}
            reply = await router.client.post("/v1/completions", json=body, headers=headers)
            assert reply.status_code == 200
            found.append(sum(one.hit_tokens for one in router.replicas) - before)
        assert found == hits

    own = {"prefix_cache_isolation": isolation, "api_key_file": "keys"}
    routing(test, count=1, keys=("first", "second"), page_size=16, **own)


def test_clients_take_turns(routing):
    """One that sends many requests does not delay another's first."""

    async def test(router):
        (fake,) = router.fakes
        fake.going.clear()

        def ask(key: str, word: str) -> asyncio.Task:
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": word, "max_tokens": 50}
            return asyncio.create_task(router.client.post("/v1/completions", json=body, headers=headers))

        asked = [ask("first", f"first {i}") for i in range(4)]
        await router.until(lambda: router.line.num_waiting == 3)
        asked.append(ask("second", "second"))
        await router.until(lambda: router.line.num_waiting == 4)
        fake.going.set()
        assert {reply.status_code for reply in await asyncio.gather(*asked)} == {200}
        assert [one["prompt"] for one in fake.asked][:3] == ["first 0", "second", "first 1"]
        assert (await router.client.get("/v1/models")).status_code == 401
        assert "authorization: Bearer second" in "".join(fake.headers)

    routing(test, count=1, keys=("first", "second"), max_in_flight=1)


def test_the_queue_is_bounded(routing):
    async def test(router):
        router.fakes[0].going.clear()
        asked = [asyncio.create_task(router.words(prompt=f"{i}")) for i in range(3)]
        await router.until(lambda: router.line.num_waiting == 2)
        reply = await router.client.post("/v1/completions", json={"prompt": "x"})
        assert reply.status_code == 429 and reply.headers["retry-after"] == "1"
        for task in asked[1:]:  # clients that leave
            task.cancel()
        await router.until(lambda: router.line.num_waiting == 0)
        router.fakes[0].going.set()
        assert said(await asked[0]) == WHOLE

    routing(test, count=1, max_in_flight=1, max_queued=2)


def test_queued_requests_time_out(routing):
    async def test(router):
        router.fakes[0].is_ready = router.fakes[0].is_alive = False
        await router.until(lambda: not router.replicas[0].is_ready)
        reply = await router.client.post("/v1/completions", json={"prompt": "x"})
        assert reply.status_code == 503 and "no replica is there" in reply.json()["error"]["message"]

    routing(test, count=1, replica_timeout=0.3, health_timeout=0.05)


def test_a_router_finishes_running_requests_at_shutdown(routing):
    async def test(router):
        router.fakes[0].going.clear()
        under_way = asyncio.create_task(router.words())
        await router.until(lambda: bool(router.fakes[0].asked))
        router.proxy.start_draining()
        assert (await router.client.post("/v1/completions", json={"prompt": "x"})).status_code == 503
        assert (await router.client.get("/ready")).status_code == 503 and not router.proxy.ended.is_set()
        router.fakes[0].going.set()
        assert said(await under_way) == WHOLE
        await asyncio.wait_for(router.proxy.ended.wait(), 5)

    routing(test, count=1)


@pytest.mark.parametrize("body", [b"{", b"[1]", b'{"prompt": 3}', b'{"messages": 5, "stream": false}'])
def test_invalid_requests_are_refused_by_replicas(routing, body):
    async def test(router):
        router.fakes[0].status = 400
        reply = await router.client.post("/v1/chat/completions", content=body)
        assert isinstance(reply, httpx.Response)

    try:
        routing(test, count=1)
    except (ValueError, HttpError) as error:  # the fake cannot read it either
        raise AssertionError from error


def test_a_long_body_is_read_in_another_thread(routing, monkeypatch):
    readers = []

    def reading(body, max_marks):
        readers.append(threading.current_thread().name)
        return parse_body_fields(body, max_marks)

    monkeypatch.setattr("duetto.serve.server.router.proxy.parse_body_fields", reading)

    async def test(router):
        await router.words(prompt="short")
        await router.words(prompt="long" * 4096)
        assert [name.startswith("duetto-request-reader") for name in readers] == [False, True]

    routing(test, count=1)


def test_a_router_needs_no_jax():
    told = "import sys, duetto.serve.server.router.main, duetto.serve.cli.route; print('jax' in sys.modules)"
    done: Any = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_router_without_descriptors_loses_no_replica(routing, monkeypatch, caplog):
    """What it lacks says nothing of them: their streams go on."""

    async def test(router):
        connect, looks = asyncio.open_connection, []

        async def lacking(*given: Any, **how: Any) -> Any:
            looks.append(1)
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(asyncio, "open_connection", lacking)
        await router.until(lambda: len(looks) >= 10)
        monkeypatch.setattr(asyncio, "open_connection", connect)
        assert all(one.is_up and one.is_ready and not one.lost for one in router.replicas)
        assert "Too many open files" in caplog.text
        assert said(await router.words()) == WHOLE

    routing(test)


def test_invalid_bodies_do_not_advance_a_client(routing):
    """A client that sends one behind each of its requests gets no more of the line than another."""
    trick = {"max_tokens": -1_000_000_000}

    async def test(router):
        (fake,) = router.fakes
        fake.going.clear()

        def ask(key: str, **body: Any) -> asyncio.Task:
            headers = {"authorization": f"Bearer {key}"}
            return asyncio.create_task(router.client.post("/v1/completions", json=body, headers=headers))

        asked = [ask("first", prompt="the first of all", max_tokens=50)]
        await router.until(lambda: bool(fake.asked))
        for i in range(8):
            asked.append(ask("first", prompt=f"first {i}", max_tokens=50))
            await router.until(lambda: router.line.num_waiting == len(asked) - 1)
            asked.append(ask("first", prompt="trick", **trick))
            await router.until(lambda: router.line.num_waiting == len(asked) - 1)
        for i in range(8):
            asked.append(ask("second", prompt=f"second {i}", max_tokens=50))
            await router.until(lambda: router.line.num_waiting == len(asked) - 1)
        fake.going.set()
        await asyncio.gather(*asked)
        prompts = [one["prompt"] for one in fake.asked]
        places = {
            who: [i for i, one in enumerate(prompts) if one.startswith(who)] for who in ("first ", "second")
        }
        assert sum(places["second"][:4]) <= sum(places["first "][1:5])

    routing(test, count=1, keys=("first", "second"), max_in_flight=1)


def test_a_request_waits_for_replicas_that_have_not_rejected_it():
    async def test():
        rejected, broken = (Replica(name, AssumedPrefixIndex(9)) for name in "ab")
        rejected.is_up = rejected.is_ready = broken.is_up = True
        line = RequestQueue([rejected, broken], 9, ServerOptions())
        job = RoutedRequest(RoutedPrompt(), failed_replicas={rejected})
        waiting = asyncio.create_task(line.assign_replica(job, 0))
        await asyncio.sleep(0)
        assert not waiting.done()
        broken.is_ready = True
        line.assign_waiting()
        assert await waiting is broken
        line.release(broken, job)
        broken.is_ready = False
        waiting = asyncio.create_task(line.assign_replica(job, 0))
        await asyncio.sleep(0)
        broken.mark_down()
        line.assign_waiting()
        with pytest.raises(HttpError, match="no replica could serve"):
            await waiting

    asyncio.run(test())
