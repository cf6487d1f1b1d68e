"""What a server refuses, and what it survives."""

import json
import re
import signal
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from cases.waiting import until

from duetto.serve.cli.main import main

ENDLESS = {"prompt": "def f", "max_tokens": 200, "ignore_eos": True, "stream": True}


def refusal(reply: httpx.Response) -> tuple[int, str, Any]:
    error = reply.json()["error"]
    return reply.status_code, error["message"], error["param"]


TALK = [{"role": "user", "content": "x"}]
COMPLETIONS = [
    ({}, 400, "prompt is missing", "prompt"),
    ({"prompt": ""}, 400, "the prompt is empty", None),
    ({"prompt": [70000]}, 400, "outside the vocabulary", None),
    ({"prompt": "x " * 400}, 400, "at most 255 are allowed", None),
    ({"prompt": "x", "temperature": -1}, 400, "temperature=-1", "temperature"),
    ({"prompt": "x", "tempreature": 1}, 400, "did you mean temperature", None),
    ({"prompt": "x", "stream": 1}, 400, "stream=1 is not allowed: true or false", "stream"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "only with stream", "stream_options"),
    ({"prompt": ["x"] * 129}, 400, "at most 128 completions", "n"),
    ({"prompt": ["x"] * 10, "n": 13}, 400, "at most 128 completions", "n"),
    ({"prompt": "x" * 200000}, 413, "more than 100000 bytes", None),
    ({"prompt": "x", "stop": ["y"] * 1025}, 400, "stop=a list of 1025 is not allowed: at most 1024", "stop"),
    ({"prompt": "x", "bad_words": ["y"] * 1025}, 400, "at most 1024 strings", "bad_words"),
    ({"prompt": "x", "stop": [" " * 4000] * 5}, 400, "at most 16384 characters together", "stop"),
    ({"prompt": "x", "bad_words": ["y" * 4000] * 5}, 400, "at most 16384 characters", "bad_words"),
    ({"prompt": "x", "model": "m"}, 404, "model 'm' is not served here", "model"),
]
CHATS = [
    ({"messages": []}, 400, "messages", None),
    ({"messages": TALK, "tools": [{}]}, 400, "tools", "tools[0].type"),
    ({"messages": TALK, "top_logprobs": 2}, 400, "only with logprobs", "top_logprobs"),
]


@pytest.mark.parametrize(
    "path, body, status, message, param",
    [
        *(("completions", *case) for case in COMPLETIONS),
        *(("chat/completions", *case) for case in CHATS),
        ("audio/speech", {"input": "x"}, 404, "Not Found", None),
    ],
)
def test_invalid_requests_are_explained(server, path, body, status, message, param):
    with server.http() as http:
        found = refusal(http.post(f"/v1/{path}", json=body))
    assert found[0] == status and message in found[1] and found[2] == param


def test_clients_have_keys(server):
    with httpx.Client(
        base_url=server.url, headers={"authorization": "bearer  second-key"}, verify=False
    ) as http:
        assert http.get("/version").status_code == 200
    with httpx.Client(base_url=server.url, verify=False) as http:
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        for path in ("/v1/models", "/metrics", "/version"):
            assert refusal(http.get(path))[0] == 401
    with server.openai(api_key="no-key") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_client_that_leaves_frees_its_pages(server):
    before = server.gauges()["vllm:request_success_total"]
    with server.http() as http:
        with http.stream("POST", "/v1/completions", json=ENDLESS) as reply:
            next(reply.iter_bytes())
        with pytest.raises(httpx.ReadTimeout):  # one that waits for the whole
            http.post(
                "/v1/completions", json=ENDLESS | {"stream": False, "max_tokens": 240, "n": 8}, timeout=0.05
            )
    until(lambda: server.gauges()["vllm:request_success_total"] >= before + 1)
    held = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
    until(lambda: not any(map(server.gauges().__getitem__, held)))


def test_clients_that_send_slowly_are_disconnected(server):
    """In the head of its request, and in the body."""
    place = urlsplit(server.url)
    head = b"POST /v1/completions HTTP/1.1\r\nauthorization: Bearer first-key\r\ncontent-length: 9\r\n"
    for sent in (b"POST /v1", head + b"host: localhost\r\n\r\n{"):
        with socket.create_connection((place.hostname, place.port), timeout=600) as own:
            own.sendall(sent)
            said = (
                b"".join(iter(lambda: own.recv(4096), b""))
                if sent.startswith(b"POST /v1 ")
                else own.recv(4096)
            )
            assert said == b"" or b" 408 " in said.partition(b"\r\n")[0]


def test_request_heads_are_bounded(server):
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), timeout=600) as own:
        own.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nlong: " + b"x" * (1 << 17))
        assert b"the head has more than 65536 bytes" in own.recv(4096)


KEY = b"authorization:Bearer first-key\r\nhost:localhost\r\n"
TWICE = b'"max_tokens": 1, "max_tokens": 2'


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", b'{"prompt": "x", %s}' % TWICE),
        ("/v1/completions", b'{"prompt": "x", "logit_bias": {%s}}' % TWICE),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x", %s}]}' % TWICE),
        ("/v1/responses", b'{"input": "x", %s}' % TWICE),
        ("/v1/embeddings", b'{"input": "x", %s}' % TWICE),
        ("/tokenize", b'{"prompt": "x", %s}' % TWICE),
    ],
)
def test_duplicate_keys_of_json_are_refused(server, path, body):
    with server.http() as http:
        reply = http.post(path, content=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "repeated_key")
    assert "the key 'max_tokens' is not allowed more than once" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "max_tokens"


BODY = b"POST /nowhere HTTP/1.1\r\n" + KEY + b"content-length: 3\r\n\r\nabc"


@pytest.mark.parametrize("before", [b"", BODY])
@pytest.mark.parametrize("piece", [1 << 20, 1000])
def test_the_longest_head_is_a_number_of_bytes(server, before, piece):
    """Exactly 64 KiB pass, alone or behind a request with a body, and no byte more."""
    begin, end = b"GET /version HTTP/1.1\r\n" + KEY + b"connection:close\r\nlong:", b"\r\n\r\n"
    for size, status in ((65536, b"200"), (65537, b"431"), (70000, b"431")):
        sent = before + begin + b"x" * (size - len(begin + end)) + end
        said = b""
        with server.socket() as own, suppress(ConnectionError):  # closed with some of it unread
            for start in range(0, len(sent), piece):
                own.sendall(sent[start : start + piece])
            while got := own.recv(1 << 16):
                said += got
        statuses = re.findall(rb"HTTP/1.1 (\d+)", said)
        assert statuses[-1:] == [status] or (size > 65536 and b"200" not in statuses)


def test_clients_that_do_not_read_are_disconnected(server):
    """Neither its seats nor the server's end wait for it."""
    place, body = urlsplit(server.url), json.dumps(ENDLESS | {"n": 32, "logprobs": 20}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer first-key\r\n"
    head += "content-length: "
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.connect((place.hostname, place.port))
        before = server.gauges()["vllm:prompt_tokens_total"]
        own.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
        until(lambda: server.gauges()["vllm:prompt_tokens_total"] > before)
        until(lambda: not server.gauges()["vllm:num_requests_running"])


def chat_of(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_text_and_tokens(server):
    with server.http() as http:
        found = http.post("/tokenize", json={"prompt": "def f", "return_token_strs": True}).json()
        assert (
            found["count"] == len(found["tokens"]) == len(found["token_strs"])
            and found["max_model_len"] == 256
        )
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "def f"}
        chat = http.post("/tokenize", json={"messages": chat_of("def f")}).json()
        assert chat["tokens"] != found["tokens"]
        nothing = {"add_special_tokens": None, "add_generation_prompt": None, "return_token_strs": None}
        for body, known in (({"prompt": "def f"}, found), ({"messages": chat_of("def f")}, chat)):
            assert http.post("/tokenize", json=body | nothing).json()["tokens"] == known["tokens"]
            reply = http.post("/tokenize", json=body | {"return_token_strs": 1})
            assert refusal(reply)[0] == 400
        reply = http.post("/v1/completions", json={"prompt": "x", "logprobs": 21})
        assert refusal(reply)[2] == "logprobs"  # what the engine refuses is named, too
        assert http.get("/tokenizer_info").json()["eos_token"] == "<|endoftext|>"


def test_streams_finish_before_the_end(starting):
    """At a signal a server takes no more requests, finishes what it has, and ends with 0."""
    server = starting()
    with (
        server.openai() as client,
        server.http() as http,
        http.stream("POST", "/v1/completions", json=ENDLESS | {"n": 16}) as reply,
    ):
        lines, create = reply.iter_lines(), client.completions.create  # whose imports take long
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: any("no more requests" in line for line in server.said))
        with pytest.raises(openai.InternalServerError, match="the server is ending"):
            create(model="demo", prompt="x")
        assert http.get("/ready").status_code == 503
        assert list(lines)[-2] == "data: [DONE]"
    assert server.ended() == 0
    assert any("no more requests are taken" in line for line in server.said)


def test_a_second_signal_ends_at_once(starting):
    server = starting()
    with server.http() as http, http.stream("POST", "/v1/completions", json=ENDLESS | {"n": 64}) as reply:
        next(reply.iter_lines())
        server.process.send_signal(signal.SIGTERM)
        until(lambda: any("no more requests" in line for line in server.said))
        assert server.stop() == 128 + signal.SIGTERM


def test_a_taken_address_is_refused_before_the_model_loads(server, capsys):
    port = str(urlsplit(server.url).port)
    assert main(["serve", "no-such-model", "--port", port]) == 1
    assert f"127.0.0.1 port {port}: Address already in use" in capsys.readouterr().err
