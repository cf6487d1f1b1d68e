"""The ingress on Ray Serve, its placement and its autoscaling, without Ray: replicas are applications of this
process."""

import asyncio
import json
import pickle
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from duetto.ray.attempt import Attempt, rank_replicas
from duetto.ray.autoscaling import LOAD, desired_replicas
from duetto.ray.deployment import asgi_scope, run_app
from duetto.ray.ingress import make_ingress_app
from duetto.ray.serve import LLMConfig, build_openai_app
from duetto.serve.kv.routing.placement import Replica, RoutedPrompt, RoutedRequest
from duetto.serve.kv.routing.prefix_index import AssumedPrefixIndex
from duetto.serve.options.router import RouterOptions
from duetto.serve.options.server import ServerOptions

EVENT = 'data: {{"choices": [{{"index": 0, "text": "{0} "}}]}}\n\n: tokens {{"0": [{0}]}}\n\n'
TOKENS = 6


class Gone(Exception):
    """Ray's error for an actor that has died."""


class Numbers:
    """An application that streams the numbers from 0 on, a token each, or those after the tokens of `resume`.
    `dies_after` numbers it is gone."""

    def __init__(self, realm: str = "one", dies_after: int | None = None):
        self.realm, self.dies_after = realm, dies_after
        self.place = Replica(realm, AssumedPrefixIndex(1000))
        self.place.is_ready, self.place.realm = True, realm
        self.paths: list[str] = []
        self.ended = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["raw_path"].decode())
        body = json.loads((await receive())["body"] or b"{}")
        resume = body.get("resume", {})
        is_other = resume.get("realm", self.realm) != self.realm
        kind = b"text/event-stream" if body.get("stream") and not is_other else b"application/json"
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": 409 if is_other else 200, "headers": headers})
        if kind != b"text/event-stream":
            text = json.dumps({"error": {"message": "other"}} if is_other else {"path": scope["path"]})
            return await send({"type": "http.response.body", "body": text.encode()})
        try:
            await self._stream(sum(map(len, resume.get("outputs", ()))), send)
        finally:
            self.ended += 1

    async def _stream(self, known: int, send: Send) -> None:
        for i in range(known, TOKENS):
            if self.dies_after == i - known:
                raise Gone("the actor died\nand so on")
            piece = (f": realm {self.realm}\n\n" + EVENT.format(i)).encode()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n: end\n\n"})


class Handle:
    """Serve's handle of some replicas; those that died are no candidates, as in Serve."""

    def __init__(self, replicas: list[Numbers]):
        self.replicas, self.answer = replicas, SimpleNamespace(remote=self.remote)
        self.hangs = False
        self.responses: list[Response] = []

    def remote(self, method: str, path: str, headers: Any, body: bytes, attempt: Attempt) -> Any:
        self.responses.append(Response(self._answer(method, path, headers, body, attempt)))
        return self.responses[-1]

    async def _answer(self, method: str, path: str, headers: Any, body: bytes, attempt: Attempt) -> Any:
        if self.hangs:
            await asyncio.Event().wait()
        chosen = rank_replicas([one.place for one in self.replicas], attempt.routed_request, 64)[0]
        attempt.assign_replica(chosen)
        found = next(one for one in self.replicas if one.place is chosen)
        yield str(chosen)
        try:
            async for part in run_app(found, asgi_scope(method, path, headers), body):
                yield part
        except Gone:
            self.replicas.remove(found)
            raise


class Response:
    """A generator with `cancel`, as Serve's."""

    def __init__(self, parts: Any):
        self._parts, self.is_cancelled = parts, False

    def __anext__(self) -> Awaitable[Any]:
        return anext(self._parts)

    def cancel(self) -> None:
        self.is_cancelled = True
        asyncio.ensure_future(self._parts.aclose())


def served(
    test: Callable[[httpx.AsyncClient], Awaitable[None]], handle: Handle, root: str = "", **limits: Any
) -> None:
    async def run() -> None:
        options = RouterOptions(replica=("http://x",), page_size=16)
        inner = make_ingress_app(lambda: handle, options, ServerOptions(**limits), (Gone,))
        transport = httpx.ASGITransport(inner, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as client:
            await asyncio.wait_for(test(client), 60)

    asyncio.run(run())


def texts(reply: httpx.Response) -> str:
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(one)["choices"][0]["text"] for one in events if "choices" in one)


ASKED = {"prompt": "import os", "stream": True}
ALL = "0 1 2 3 4 5 "


def test_a_stream_goes_on_in_another_replica_of_its_realm():
    dying, other, same = Numbers(dies_after=2), Numbers("two"), Numbers()
    handle = Handle([dying, other, same])
    other.place.chosen, same.place.chosen = 1, 2  # the first is asked first

    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.post("/v1/completions", json=ASKED)
        assert texts(reply) == ALL and reply.text.endswith("data: [DONE]\n\n")
        assert (dying.ended, other.ended, same.ended) == (1, 0, 1)
        await asyncio.sleep(0)
        assert not same.place.requests and not dying.place.requests
        assert "duetto:router_resumed_total 1.0" in (await client.get("/metrics")).text

    served(test, handle)


def test_no_answer_is_of_two_realms():
    handle = Handle([Numbers(dies_after=2), Numbers("two"), Numbers("three")])
    handle.replicas[1].place.chosen, handle.replicas[2].place.chosen = 1, 2

    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.post("/v1/completions", json=ASKED)
        assert texts(reply) == "0 1 " and "no other has the weights" in reply.text

    served(test, handle)


def test_a_request_without_a_replica_in_time_gets_502():
    handle = Handle([Numbers()])
    handle.hangs = True

    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.post("/v1/completions", json=ASKED)
        assert reply.status_code == 502

    served(test, handle, queue_timeout=0.01)


def test_a_client_that_leaves_ends_its_request():
    replica = Numbers()

    async def test() -> None:
        scope = asgi_scope("POST", "/v1/completions?a=b", [])
        assert (scope["path"], scope["query_string"]) == ("/v1/completions", b"a=b")
        parts = run_app(replica, scope, json.dumps(ASKED).encode())
        assert (await anext(parts))[0] == 200
        await parts.aclose()
        assert replica.ended == 1

    asyncio.run(test())


def test_a_request_whose_client_has_left_is_cancelled():
    handle = Handle([Numbers()])
    handle.hangs = True

    async def test(client: httpx.AsyncClient) -> None:
        asked = asyncio.create_task(client.post("/v1/completions", json=ASKED))
        while not handle.responses:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert handle.responses[0].is_cancelled

    served(test, handle)


def test_an_answer_to_head_ends():
    async def test(client: httpx.AsyncClient) -> None:
        assert (await client.head("/v1/models")).status_code == 200

    served(test, Handle([Numbers()]))


def test_paths_have_no_route_prefix_in_replicas():
    replica = Numbers()

    async def test(client: httpx.AsyncClient) -> None:
        assert (await client.get("/demo/v1/models")).json() == {"path": "/v1/models"}
        assert replica.paths == ["/v1/models"]
        assert (await client.get("/demo/ready")).status_code == 200

    served(test, Handle([replica]), root="/demo")


# ---------------------------------------------------------------- placement


def places(*realms: str) -> list[Replica]:
    return [Numbers(realm).place for realm in realms]


def test_prompts_go_to_their_pages_and_resumptions_to_their_realm():
    async def test() -> None:
        one, two = found = places("one", "two")
        job = RoutedRequest(RoutedPrompt([b"a", b"b"], 16, 32))
        attempt = Attempt(job)
        assert rank_replicas(found, job, 64) == [one, two]
        attempt.assign_replica(two)
        assert two.load > one.load and pickle.loads(pickle.dumps(attempt)) is None
        attempt.release_replica()
        await asyncio.sleep(0)
        assert two.load == 0
        assert rank_replicas(found, job, 64) == [two, one]  # which has its pages
        job.realm = "one"
        assert rank_replicas(found, job, 64) == [one, two]
        refused: Any = Attempt(job)
        refused.assign_replica(one)
        job.exclude_mismatched(refused)
        assert rank_replicas(found, job, 64) == [two]
        assert rank_replicas(found, RoutedRequest(RoutedPrompt()), 1) == [two, one]  # one is full
        two.add_request(RoutedRequest(RoutedPrompt()))
        assert rank_replicas(found, RoutedRequest(RoutedPrompt()), 1) == []

    asyncio.run(test())


def test_a_request_that_left_before_it_was_placed_counts_nowhere():
    async def test() -> None:
        (one,) = places("one")
        attempt = Attempt(RoutedRequest(RoutedPrompt()))
        attempt.release_replica()
        attempt.assign_replica(one)
        assert not one.requests

    asyncio.run(test())


# ---------------------------------------------------------------- autoscaling and configuration


@pytest.mark.parametrize(
    ("loads", "requests", "queued", "expected"),
    [
        ([0.0], 0, 0, 1),
        ([0.9], 4, 0, 1),
        ([1.1], 4, 0, 2),
        ([0.9, 0.9], 12, 6, 4),
        ([0.1, 0.1], 2, 0, 1),
        ([9.0], 9, 0, 5),
    ],
)
def test_replicas_follow_from_tokens_in_flight(loads, requests, queued, expected):
    context = SimpleNamespace(
        aggregated_metrics={LOAD: dict(enumerate(loads))},
        total_num_requests=requests,
        total_queued_requests=queued,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=5,
    )
    assert desired_replicas(context) == (expected, {})


def test_a_configuration_has_the_options_of_its_deployment():
    own = {"autoscaling_config": {"min_replicas": 1}, "ray_actor_options": {"num_gpus": 1}}
    config = LLMConfig(
        {"model_id": "demo"}, deployment_config=own, runtime_env={"env_vars": {}}, target_tokens_in_flight=9
    )
    options = config.deployment_options
    assert options["autoscaling_config"]["policy"] == {
        "policy_function": f"{desired_replicas.__module__}.{desired_replicas.__name__}"
    }
    assert options["ray_actor_options"] == {"num_gpus": 1, "runtime_env": {"env_vars": {}}}
    assert config.server_options.served_model_name == ["demo"]


@pytest.mark.parametrize(
    ("actor", "bundle"),
    [
        ({}, {"CPU": 1}),
        ({"num_cpus": 0, "num_gpus": 4, "resources": {"TPU": 2}}, {"GPU": 4, "TPU": 2}),
    ],
)
def test_a_model_over_several_actors_has_a_placement_group(actor, bundle):
    own = {"ray_actor_options": actor, "num_replicas": 2}
    options = LLMConfig(engine_kwargs={"nnodes": 3}, deployment_config=own).deployment_options
    assert options["placement_group_bundles"] == 3 * [bundle] and options["num_replicas"] == 2
    alone = LLMConfig(deployment_config=own).deployment_options
    assert "placement_group_bundles" not in alone
    wanted = own | {"placement_group_bundles": [{"CPU": 9}]}
    options = LLMConfig(engine_kwargs={"nnodes": 3}, deployment_config=wanted).deployment_options
    assert options["placement_group_bundles"] == [{"CPU": 9}]


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"server_kwargs": {"port": 1}}, "server_kwargs: port is not allowed"),
        ({"server_kwargs": {"max_queued": 0}}, "max_queued"),
        ({"router_kwargs": {"page_size": 0}}, "page_size"),
        ({"target_tokens_in_flight": 9}, "without autoscaling_config"),
        (
            {"target_tokens_in_flight": 0, "deployment_config": {"autoscaling_config": {}}},
            "target_tokens_in_flight 0 is not allowed",
        ),
    ],
)
def test_a_configuration_that_is_wrong_is_refused(fields, refusal):
    with pytest.raises(ValueError, match=refusal):
        LLMConfig(**fields)


def test_an_application_has_one_model():
    with pytest.raises(ValueError, match="with 2 models"):
        build_openai_app({"llm_configs": [{}, {}]})
