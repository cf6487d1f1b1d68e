"""What a stream costs the server: processor time of its event loop for each chunk that it writes.

    python benchmarks/studies/server.py --streams 200 --tokens 200

A server of the shipped model is started, as many streams are read at once, and the time that the system has
counted for its main thread, which the event loop runs in, is divided by the chunks. Beside it stands a bare
one, uvicorn with an application that writes chunks of the same size and does nothing else. Linux only.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n"
END = b"data: [DONE]"
STEP = 0.02  # seconds
CHUNK = (
    b'data: {"id":"cmpl-' + 32 * b"0" + b'","object":"text_completion","created":1700000000,"model":"demo",'
)
CHUNK += b'"choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'


@contextmanager
def server(seats: int):
    """A server's process and port."""
    words = [
        "-m", "duetto", "serve", "--port", "0", "--max-num-seqs", str(seats), "--max-model-len", "512",
        "--max-queued", "4096", "--quiet",
    ]  # fmt: skip
    with started(words) as found:
        yield found


@contextmanager
def started(words: list[str]):
    command = [sys.executable, *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process.pid, port_of(process)
    finally:
        process.terminate()
        process.communicate()


def port_of(process: subprocess.Popen[str]) -> int:
    """The port of a server that has been started, once it serves."""
    assert process.stderr is not None
    return next(int(found[1]) for line in process.stderr if (found := re.search(r":(\d+)/v1", line)))


def loop_seconds(pid: int) -> float:
    """Processor time of a process's main thread."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def read_stream(port: int, asked: dict[str, Any]) -> int:
    """Chunks of one stream, read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(asked)
    writer.write((HEAD.format(len(body)) + body).encode())
    chunks, tail = 0, b""
    while END not in tail and (data := await reader.read(1 << 16)):
        chunks += data.count(b"data: {")
        tail = tail[-len(END) :] + data
    writer.close()
    return chunks


async def every(port: int, streams: int, tokens: int) -> int:
    asked = {"max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    reads = (read_stream(port, asked | {"prompt": f"def f{i}"}) for i in range(streams))
    return sum(await asyncio.gather(*reads))


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Writes as many chunks as are asked for, each some time after the one before, as steps of an engine
    come."""
    tokens = json.loads((await receive())["body"])["max_tokens"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(tokens):
        await asyncio.sleep(STEP)
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def serve_bare() -> None:
    own = socket.create_server(("127.0.0.1", 0))
    print(f"at http://127.0.0.1:{own.getsockname()[1]}/v1", file=sys.stderr, flush=True)
    config = uvicorn.Config(
        bare, http="httptools", loop="uvloop", lifespan="off", log_level="error", ws="none"
    )
    uvicorn.Server(config).run(sockets=[own])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        return serve_bare()
    print("| server | streams | chunks | us of the event loop for each | chunks/s |\n|---|---|---|---|---|")
    with server(args.streams) as ours, started([sys.argv[0], "--bare"]) as theirs:
        both = {"duetto": ours, "bare": theirs}
        for _, port in both.values():
            asyncio.run(every(port, args.streams, 4))  # compiled and connected once
        for _ in range(args.rounds):
            for name, (pid, port) in both.items():
                before, begin = loop_seconds(pid), time.perf_counter()
                chunks = asyncio.run(every(port, args.streams, args.tokens))
                cost, seconds = 1e6 * (loop_seconds(pid) - before) / chunks, time.perf_counter() - begin
                print(f"| {name} | {args.streams} | {chunks} | {cost:.1f} | {chunks / seconds:.0f} |")


if __name__ == "__main__":
    main()
