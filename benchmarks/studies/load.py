"""Whether a server stands clients of all kinds for a while.

    python benchmarks/studies/load.py --streams 200 --minutes 10

A server of the shipped model has as many requests at once: streams that are read to their end, slowly or at
once, streams that are left or cut off on their way, and whole answers. Whatever is read to its end has to be
what the library gives offline. Each minute: requests by kind, the server's memory and descriptors; at its
end how late the event loop was, and what is left in the engine. Linux only.
"""

import argparse
import asyncio
import os
import random
import re
import socket
import struct
import time
from collections import Counter
from pathlib import Path

import httpx
import msgspec
from server import server  # beside this file

from duetto import LLM, SamplingParams

DISTINCT = 64  # requests
TOKENS = 16, 160
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: close by a reset
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n"
KINDS = {"read": 60, "slow": 8, "whole": 12, "left": 15, "cut off": 5}


def asked(i: int) -> dict:
    chance = random.Random(i)
    sampling = {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": i}
    return sampling | {"prompt": f"def f{i}(x", "max_tokens": chance.randrange(*TOKENS), "ignore_eos": True}


def expected() -> list[str]:
    """What the library gives for each request."""
    with LLM(max_model_len=512, max_num_seqs=32) as llm:
        own = llm.get_default_sampling_params()
        bodies = [asked(i) for i in range(DISTINCT)]
        params = []
        for body in bodies:
            one = own.clone()
            for name in body.keys() - {"prompt"}:
                setattr(one, name, body[name])
            params.append(one)
        assert all(isinstance(one, SamplingParams) for one in params)
        return [out.outputs[0].text for out in llm.generate([body["prompt"] for body in bodies], params)]


async def request(port: int, i: int, kind: str, chance: random.Random) -> str | None:
    """The text of an answer, None where it was not read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = msgspec.json.encode(asked(i) | {"stream": kind != "whole"})
    writer.write(HEAD.format(len(body)).encode() + body)
    most = chance.randrange(20000) if kind in ("left", "cut off") else None
    data = b""
    while most is None or len(data) < most:
        piece = await reader.read(300 if kind == "slow" else 1 << 16)
        if not piece:
            break
        data += piece
        if kind == "slow":
            await asyncio.sleep(chance.random() / 50)
    if kind == "cut off":
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()
    if most is not None:
        return None
    assert b" 200 OK\r\n" in data[:40], data[:400]
    pieces = re.findall(rb'{"id":"cmpl.*}', data)
    return "".join(choice["text"] for one in pieces for choice in msgspec.json.decode(one)["choices"])


async def client(port: int, number: int, until: float, texts: list[str], done: Counter) -> None:
    chance = random.Random(number)
    while time.monotonic() < until:
        i = chance.randrange(DISTINCT)
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        text = await request(port, i, kind, chance)
        done[kind] += 1
        if text is not None and text != texts[i]:
            done["WRONG"] += 1


def process(pid: int) -> tuple[int, int]:
    """MiB of memory, and descriptors."""
    (rss,) = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(rss) >> 10, len(os.listdir(f"/proc/{pid}/fd"))


def metric(text: str, name: str) -> float:
    return sum(float(x) for x in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


async def told(pid: int, until: float, done: Counter) -> None:
    begin = time.monotonic()
    while (left := until - time.monotonic()) > 0:
        await asyncio.sleep(min(60, left))
        rss, files = process(pid)
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(done.items()))
        print(f"{time.monotonic() - begin:5.0f} s: {rss} MiB, {files} descriptors; {kinds}", flush=True)


async def every(pid: int, port: int, streams: int, seconds: float, texts: list[str]) -> Counter:
    done, until = Counter(), time.monotonic() + seconds
    clients = (client(port, i, until, texts, done) for i in range(streams))
    await asyncio.gather(told(pid, until, done), *clients)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10)
    args = parser.parse_args()
    texts = expected()
    with server(args.streams) as (pid, port):
        done = asyncio.run(every(pid, port, args.streams, 60 * args.minutes, texts))
        time.sleep(2)
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        name = "duetto:event_loop_delay_seconds"
        looks = metric(text, f"{name}_count")
        for limit in ("0.005", "0.01", "0.025", "0.05", "0.1", "0.25"):
            (within,) = re.findall(rf'{name}_bucket{{le="{limit}"}} (\S+)', text)
            print(f"event loop late by at most {limit} s: {100 * float(within) / looks:.2f} %")
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            print(f"{gauge}: {metric(text, gauge)}")
    raise SystemExit("an answer was wrong" if done["WRONG"] else 0)


if __name__ == "__main__":
    main()
