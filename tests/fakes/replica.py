"""Servers that compute nothing: what a router asks of them, and their ways to fail."""

import asyncio
import json
from typing import Any

HEAD = "HTTP/1.1 {} OK\r\ncontent-type: {}\r\n"
EVENT = 'data: {{"id": "{}", "choices": [{{"index": 0, "text": "{} "}}]}}\n\n'


class FakeReplica:
    """Says the numbers from 0 on, a token each, as a stream that can go on elsewhere; `dies_after` so many of
    its own it goes away in the middle of an event, and `hangs_after` so many it says nothing more. One that
    went away is ready again at once if it `comes_back`. Unless it `ends` its answers it says nothing behind
    the last event of a stream."""

    def __init__(self, tokens: int = 6):
        self.tokens, self.status, self.is_ready, self.is_alive = tokens, 200, True, True
        self.tells = True  # of whole answers too, which tokens they have so far
        self.realm = "one"  # what its tokens follow from; empty: it does not name it
        self.dies_after: int | None = None
        self.comes_back = True
        self.hangs_after: int | None = None
        self.ends = True  # its answers, behind their last events
        self.garbage: list[bytes] = []  # each is sent once, in place of an answer
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.going = asyncio.Event()  # cleared: answers wait
        self.going.set()
        self._tasks: dict[Any, asyncio.StreamWriter] = {}  # of each connection

    async def start(self) -> "FakeReplica":
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def close(self) -> None:
        for own in self._server.sockets:
            asyncio.get_running_loop().remove_reader(own)
        for _ in range(10):  # what was accepted begins in one of the next turns; a closed server leaks it
            await asyncio.sleep(0)
        self._server.close()
        for task, writer in self._tasks.items():
            task.cancel()
            writer.transport.abort()  # also where its client does not read
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(w.wait_closed() for w in self._tasks.values()), return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks[asyncio.ensure_future(self._serve(reader, writer))] = writer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):  # the last at the end
            pass
        except (ValueError, AttributeError):  # what is asked is no JSON object
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if not self.is_alive:
            await asyncio.Event().wait()
        path = head.split()[1]
        if path in ("/ready", "/health"):
            status = 200 if self.is_ready or path == "/health" else 503
            named = f"x-duetto-realm: {self.realm.split()[0]}\r\n" if self.realm else ""
            head = HEAD.format(status, "text/plain") + named
            return writer.write((head + "content-length: 0\r\n\r\n").encode())
        self.headers.append(head)
        length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length) or b"{}")
        self.asked.append(body)
        await self.going.wait()
        if self.garbage:
            return writer.write(self.garbage.pop())
        if body.get("resume", {}).get("realm", self.realm) != self.realm:
            told = '{"error": {"message": "other weights"}}'
            head = HEAD.format(409, "application/json") + f"content-length: {len(told)}\r\n\r\n"
            return writer.write((head + told).encode())
        if self.status == 200 and (body.get("stream") or (self.tells and "resume" in body)):
            return await self._stream(body, writer)
        text = json.dumps({"said": path} if self.status == 200 else {"error": {"message": "no"}}).encode()
        if self.dies_after is not None:
            return writer.transport.abort()
        kind = HEAD.format(self.status, "application/json")
        writer.write(f"{kind}content-length: {len(text)}\r\n\r\n".encode() + text)

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        chunk = "transfer-encoding: chunked\r\n\r\n"
        writer.write((HEAD.format(200, "text/event-stream") + chunk).encode())
        resume = body.get("resume") or {"id": "none"}
        known = sum(map(len, resume.get("outputs", ())))
        is_whole = not body.get("stream")
        for i in range(known, self.tokens):
            if i - known == self.dies_after:
                self.is_ready = self.comes_back
                await self._say(writer, EVENT.format(resume["id"], i)[:20])
                return writer.transport.abort()
            if i - known == self.hangs_after:
                self.is_alive = False
                await asyncio.Event().wait()
            comment = f': tokens {{"0": [{i}]}}\n\n' if "outputs" in resume else ""
            if self.realm and comment:
                comment = f": realm {self.realm}\n\n{comment}"
            event = "" if is_whole else EVENT.format(resume["id"], i)
            await self._say(writer, ": ping\n\n" + event + comment)
        last = json.dumps({"said": list(range(self.tokens))}) if is_whole else "[DONE]"
        await self._say(writer, f"data: {last}\n\n" + (": end\n\n" if "outputs" in resume else ""))
        if not self.ends:
            await asyncio.Event().wait()
        writer.write(b"0\r\n\r\n")

    async def _say(self, writer: asyncio.StreamWriter, text: str) -> None:
        writer.write(f"{len(text):x}\r\n{text}\r\n".encode())
        await writer.drain()
