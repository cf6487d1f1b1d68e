"""Errors of the model at the end of an answer are passed on, and no replica is lost by them."""

import json

import pytest
from fakes.replica import HEAD

ERROR = {"error": {"message": "NaN", "type": "server_error", "param": None, "code": "nan_logits"}}


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_error_of_the_model_is_the_answer(routing, is_stream):
    text = f"data: {json.dumps(ERROR, separators=(',', ':'))}\n\n: end\n\n"
    answer = HEAD.format(200, "text/event-stream") + f"content-length: {len(text)}\r\n\r\n{text}"

    async def test(router):
        for fake in router.fakes:
            fake.garbage = [answer.encode()]
        reply = await router.client.post("/v1/completions", json={"prompt": "x", "stream": is_stream})
        assert reply.status_code == (200 if is_stream else 500)
        assert json.loads(reply.text.strip().removeprefix("data: ")) == ERROR
        assert sum(len(fake.asked) for fake in router.fakes) == 1
        assert all(replica.is_ready for replica in router.replicas)

    routing(test)
