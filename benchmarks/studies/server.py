"""What a stream costs the server: processor time of its event loop for each chunk that it writes.

    python benchmarks/studies/server.py --streams 200 --tokens 200

A server of the shipped model is started, as many streams are read at once, and the time that the system has
counted for its main thread, which the event loop runs in, is divided by the chunks. Linux only.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n"
BODY = '{{"prompt": "def f{}", "max_tokens": {}, "ignore_eos": true, "stream": true, "temperature": 0}}'
END = b"data: [DONE]"


@contextmanager
def server(seats: int):
    """A server's process and port."""
    words = [
        "serve", "--port", "0", "--max-num-seqs", str(seats), "--max-model-len", "512",
        "--max-queued", "4096", "--quiet",
    ]  # fmt: skip
    command = [sys.executable, "-m", "duetto", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        port = next(int(found[1]) for line in process.stderr if (found := re.search(r":(\d+)/v1", line)))
        yield process.pid, port
    finally:
        process.terminate()
        process.communicate()


def loop_seconds(pid: int) -> float:
    """Processor time of a process's main thread."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def read(port: int, number: int, tokens: int) -> int:
    """Chunks of one stream, read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = BODY.format(number, tokens)
    writer.write((HEAD.format(len(body)) + body).encode())
    chunks, tail = 0, b""
    while END not in tail and (data := await reader.read(1 << 16)):
        chunks += data.count(b"data: {")
        tail = tail[-len(END) :] + data
    writer.close()
    return chunks


async def every(port: int, streams: int, tokens: int) -> int:
    return sum(await asyncio.gather(*(read(port, i, tokens) for i in range(streams))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| streams | chunks | us of the event loop for each | chunks/s |\n|---|---|---|---|")
    with server(args.streams) as (pid, port):
        asyncio.run(every(port, args.streams, 4))  # compiled and connected once
        for _ in range(args.rounds):
            before, begin = loop_seconds(pid), time.perf_counter()
            chunks = asyncio.run(every(port, args.streams, args.tokens))
            cost, seconds = loop_seconds(pid) - before, time.perf_counter() - begin
            print(f"| {args.streams} | {chunks} | {1e6 * cost / chunks:.1f} | {chunks / seconds:.0f} |")


if __name__ == "__main__":
    main()
