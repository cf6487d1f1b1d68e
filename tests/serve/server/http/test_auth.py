"""Files of keys, and who is told that none are asked for."""

import socket

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from duetto.serve.server.http.guards import ApiKeyCheck, Guard, read_api_keys
from duetto.serve.server.http.lifecycle import is_local_socket


@pytest.mark.parametrize(
    "content, keys",
    [
        (b"\xef\xbb\xbfa\r\n# a comment\n\n  b c \nk\xc3\xa9y", ["a", "b c", "k\xe9y"]),  # Windows' mark
        (b"", "it has no key"),
        (b"\n # none\n", "it has no key"),
        (b"\xff\xfea\x00", "can't decode byte 0xff"),
    ],
)
def test_a_file_of_keys(tmp_path, content, keys):
    file = tmp_path / "keys"
    file.write_bytes(content)
    if isinstance(keys, list):
        assert read_api_keys(str(file)) == keys
    else:
        with pytest.raises(ValueError, match=f"api_key_file {file} is not allowed: .*{keys}"):
            read_api_keys(str(file))


SENT = [
    (b"Bearer a", 200), (b"bearer  b c ", 200), ("Bearer k\xe9y".encode(), 200), (b"Bearer A", 401),
    (b"a", 401), (b"Basic a", 401), (b"Bearer", 401), (b"Bearer \xff", 401), (b"", 401),
]  # fmt: skip


@pytest.mark.parametrize("sent, status", SENT)
def test_what_clients_send(sent, status):
    async def answer(request: Request) -> Response:
        return Response()

    app = Starlette(routes=[Route("/", answer), Route("/open", answer)])
    http = TestClient(Guard(app, ApiKeyCheck(["a", "b c", "k\xe9y"], open_paths=["/open"])))
    reply = http.get("/", headers={b"authorization": sent})
    assert reply.status_code == status and http.get("/open").status_code == 200
    assert reply.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


@pytest.mark.parametrize(
    "host, is_own",
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("::", False)],
)
def test_addresses_of_this_machine_alone(host, is_own):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as own:
        try:
            own.bind((host, 0))
        except OSError as error:
            pytest.skip(f"{host}: {error.strerror}")
        assert is_local_socket(own) == is_own
