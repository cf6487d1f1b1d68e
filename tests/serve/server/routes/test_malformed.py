"""Requests that are not what they should be, hundreds in each run and thousands with `-m minutes`: each is
told so, and the engine notices nothing."""

import io
import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from typing import Any

import pytest
from cases.waiting import until

CLIENTS = 8
SIZES = [pytest.param(0, id="hundreds"), pytest.param(1, id="thousands", marks=pytest.mark.minutes)]
BODIES, CONNECTIONS = (320, 2400), (120, 800)  # of each size
REFUSED = (200, 2000), (60, 400)  # at least so many of them; the others are right by chance, or cut short
PATHS = [
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize",
]  # fmt: skip
GOOD = {"prompt": "def", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
INPUT = {"input": "def", "user": "x"}
DEEP: Any = json.loads("[" * 90 + "]" * 90)
ANYTHING: list[Any] = [
    None, True, -1, 0, 0.5, 1e308, 2**70, "", "\ud800", "\x00", [], {}, [[]], [{}], [None], [-1], [2**40],
    DEEP, "x" * 999, ["x"] * 1100, {"": None}, {"type": "json_object"}, [{"role": "user"}],
    [{"role": "user", "content": 1}],
]  # fmt: skip
FIELDS = [
    "input", "instructions", "dimensions", "encoding_format", "pooling", "include", "text",
    "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stop", "stop_token_ids", "bad_words",
    "logit_bias", "seed", "stream", "stream_options", "tokens", "echo", "logprobs", "top_logprobs",
    "temperature", "top_p", "top_k", "model", "tools", "chat_template_kwargs", "suffix", "user",
    "allowed_token_ids", "metadata", "add_special_tokens", "response_format", "min_tokens",
    "return_token_strs", "unheard_of",
]  # fmt: skip
METHODS = [b"GET", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"CONNECT", b"PRI", b"post", b"P\x00ST"]
HEADERS = [
    b"content-length: -1", b"content-length: 1e3", b"content-length: 99999999999999999999999",
    b"content-length: 5", b"content-length: 5\r\ncontent-length: 6", b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked", b"transfer-encoding: identity", b"expect: 100-continue",
    b"expect: 200-ok", b"connection: upgrade\r\nupgrade: h2c", b"connection: upgrade\r\nupgrade: websocket",
    b"connection: close", b"content-encoding: gzip", b": empty", b"no colon", b"nul: \x00", b" folded: x",
    b"high: \xff\xfe", b"long: " + b"x" * 70000, b"authorization: Basic eA==", b"traceparent: 00-zz-zz-zz",
    b"host: y\r\nhost: z", b"content-type: text/plain; charset=\xff",
]  # fmt: skip
TARGETS = [
    b"/" + b"x" * 70000,
    b"/%00%ff%zz",
    b"//",
    b"*",
    b"http://elsewhere/health",
    b"/v1/../metrics",
    b"\xff",
    b"",
]
CHUNKS = [
    b'5\r\n{"a":\r\n',
    b"zz\r\n",
    b"-1\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffffff\r\nx",
    b"1;ext=\x00\r\n{\r\n",
    b"3\r\nabcdef",
]


def good(path: str) -> dict[str, Any]:
    return INPUT if path in ("/v1/responses", "/v1/embeddings") else GOOD


def bodies(chance: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Cut, changed, of fields that hold anything, or no JSON at all."""
    for case in range(count):
        path = chance.choice(PATHS)
        body = bytearray(json.dumps(good(path)).encode())
        match case % 4:
            case 0:
                del body[chance.randrange(len(body)) :]
            case 1:
                for _ in range(chance.randrange(1, 4)):
                    body[chance.randrange(len(body))] = chance.randrange(256)
            case 2:
                fields = {name: chance.choice(ANYTHING) for name in chance.sample(FIELDS, 3)}
                body = bytearray(json.dumps({"max_tokens": 1} | fields).encode())
            case 3:
                fields = {name: chance.choice(ANYTHING) for name in chance.sample(FIELDS, 2)}
                body = bytearray(json.dumps(good(path) | fields).encode())
        yield path, bytes(body)


def connections(chance: random.Random, count: int) -> Iterator[tuple[bytes, bool]]:
    """What a client writes, and whether it leaves before it has read."""
    for _ in range(count):
        sent = b""
        for _ in range(chance.choice([1, 1, 1, 3, 8])):
            path = chance.choice(PATHS)
            body, path = json.dumps(good(path)).encode(), path.encode()
            method, headers, tail = b"POST", [b"host: localhost", b"authorization: Bearer first-key"], body
            length = [b"content-length: %d" % len(body)]
            match chance.randrange(6):
                case 0:
                    method = chance.choice(METHODS)
                case 1:
                    headers += chance.sample(HEADERS, 2)
                case 2:
                    path = chance.choice(TARGETS)
                case 3:
                    length, tail = [b"transfer-encoding: chunked"], b"".join(chance.sample(CHUNKS, 3))
                case 4:
                    length = [b"content-length: %d" % chance.choice([0, 3, len(body) + 5, 10**7])]
                case 5:
                    tail = chance.randbytes(50)
            line = b"%s %s HTTP/%s" % (method, path, chance.choice([b"1.1", b"1.1", b"1.0", b"2.0", b"x"]))
            sent += b"\r\n".join([line, *headers, *length, b"", tail])
        if chance.random() < 0.2:
            sent = sent[: chance.randrange(len(sent))]
        yield sent, chance.random() < 0.2


class Said:
    """Bytes that a server has said, to be read as answers."""

    def __init__(self, data: bytes):
        self._file = io.BytesIO(data)
        self._file.close = lambda: None

    def makefile(self, mode: str) -> io.BytesIO:
        return self._file

    @property
    def is_read(self) -> bool:
        return self.tell() == len(self._file.getvalue())

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, start: int) -> None:
        self._file.seek(start)


def answers(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The answers of a connection; one that was cut off is passed over."""
    said = Said(data)
    while not said.is_read:
        answer: Any = HTTPResponse(said)  # type: ignore[arg-type]
        try:
            answer.begin()
            start, body = said.tell(), answer.read()
            if body.startswith(b"HTTP/1."):  # one to HEAD has the length of a body, but none
                said.seek(start)
                body = b""
            yield answer.status, body
        except HTTPException:
            return


def talk(own: socket.socket, sent: bytes, leaves: bool) -> bytes:
    """What is said to one that writes, and then leaves or ends its half and reads."""
    found = b""
    with own:
        try:
            own.sendall(sent)
            if leaves:
                return b""
            own.settimeout(0.2)  # or what it sent is not an end yet
            try:
                found = own.recv(1 << 16)
            except TimeoutError:
                pass
            own.shutdown(socket.SHUT_WR)
            own.settimeout(60)
            while piece := own.recv(1 << 16):
                found += piece
        except (ConnectionError, BrokenPipeError, OSError):
            pass
    return found


def check(status: int, body: bytes, sent: bytes) -> None:
    """Nothing but a client's error, in OpenAI's shape."""
    assert status < 500, (status, body, sent)
    if status >= 400 and body:
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}, (body, sent)
        assert error["message"] and isinstance(error["message"], str), (body, sent)


@pytest.fixture
def unmoved(server):
    """An engine that afterwards says what it has said before, and has nothing left to do."""
    asked = {"prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0.9, "seed": 5, "logprobs": 1}
    heard = len(server.said)
    with server.http() as http:
        before = http.post("/v1/completions", json=asked).json()["choices"]
        yield
        until(lambda: not server.gauges()["vllm:num_requests_running"])
        assert not server.gauges()["vllm:num_requests_waiting"]
        assert http.post("/v1/completions", json=asked).json()["choices"] == before
        assert http.get("/health").status_code == 200
    said = server.said[heard:]
    assert not any("Traceback" in line or "rror" in line for line in said), "".join(said)[-5000:]


@pytest.mark.parametrize("size", SIZES)
def test_bodies(server, unmoved, size):
    with server.http() as http, ThreadPoolExecutor(CLIENTS) as clients:

        def post(path: str, body: bytes) -> int:
            reply = http.post(path, content=body)
            check(reply.status_code, b"" if reply.is_success else reply.content, body)
            return reply.status_code

        cases = bodies(random.Random(size), BODIES[size])
        found = [done.result() for done in [clients.submit(post, *case) for case in cases]]
    assert sum(status >= 400 for status in found) >= REFUSED[0][size]


@pytest.mark.parametrize("size", SIZES)
def test_connections(server, unmoved, size):
    with ThreadPoolExecutor(CLIENTS) as clients:
        cases = list(connections(random.Random(10 + size), CONNECTIONS[size]))
        heard = clients.map(lambda case: talk(server.socket(), *case), cases)
        found = [
            (*answer, sent) for (sent, _), data in zip(cases, heard, strict=True) for answer in answers(data)
        ]
    for status, body, sent in found:
        check(status, body, sent)
    assert {400, 404, 405} <= {status for status, _, _ in found}
    assert sum(status >= 400 for status, _, _ in found) >= REFUSED[1][size]
