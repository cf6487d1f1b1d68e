"""Two router processes in front of the same replicas, and clients of one that is killed: the client that the
documentation shows resumes its streams through the other."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from cases.documents import ROOT, blocks
from cases.serving import LIMIT, Process
from fakes.replica import FakeReplica

COUNT, TOKENS, CLIENTS = 50, 40, 12
WHOLE = [*range(TOKENS)]
HELD = '"text": "9 "'  # the token before which answers wait


class HeldReplica(FakeReplica):
    """A replica that says a few tokens, and the others once it may."""

    def __init__(self, may: threading.Event):
        super().__init__(TOKENS)
        self.may = may

    async def _say(self, writer: asyncio.StreamWriter, text: str) -> None:
        while HELD in text and not self.may.is_set():
            await super()._say(writer, ": ping\n\n")  # its clients wait 5 s for a sign of life
            await asyncio.sleep(0.02)
        await super()._say(writer, text)


@contextmanager
def replicas(may: threading.Event) -> Iterator[list[FakeReplica]]:
    """Replicas in an event loop of another thread, whose answers end once they may."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(LIMIT)

    fakes = [wait(HeldReplica(may).start()) for _ in range(COUNT)]
    try:
        yield fakes
    finally:
        for fake in fakes:
            wait(fake.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_streams_of_a_killed_router_resume_through_the_other():
    (block,) = (one for one in blocks(ROOT / "docs" / "reliability.md") if one.language == "python")
    documented: dict[str, Any] = {}
    exec(block.text, documented)  # noqa: S102
    came, may = threading.Semaphore(0), threading.Event()

    def read(urls: list[str], i: int) -> list[dict[str, Any]]:
        found = []
        for data in documented["events"](urls, {"prompt": f"{i} " * 200}):
            found.append(data)
            if len(found) == 3:
                came.release()
        assert found.pop() == "[DONE]"
        return [json.loads(data) for data in found]

    with replicas(may) as fakes, ThreadPoolExecutor(CLIENTS) as pool:
        words = [f"--replica={fake.url}" for fake in fakes]
        routers = [Process("route", "--port", "0", *words) for _ in range(2)]
        urls = [router.url for router in routers]
        asked = [pool.submit(read, urls, i) for i in range(CLIENTS)]
        assert all(came.acquire(timeout=LIMIT) for _ in range(CLIENTS))
        routers[0].end()
        may.set()
        answers = [one.result(LIMIT) for one in asked]
        resumed = [body["resume"]["outputs"] for fake in fakes for body in fake.asked]
        assert routers[1].end(signal.SIGTERM) == 0
    for events in answers:
        assert [int(event["choices"][0]["text"]) for event in events] == WHOLE
        assert len({event["id"] for event in events}) == 1
    assert sum(bool(outputs) for outputs in resumed) == CLIENTS == len(resumed) / 2
