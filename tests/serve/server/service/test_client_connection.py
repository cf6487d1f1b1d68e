"""Work for clients that may leave."""

import asyncio

import pytest

from duetto.serve.server.service.client_connection import ClientLeft, run_while_connected


def test_work_is_cancelled_when_its_client_leaves():
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def client() -> None:
        with pytest.raises(ClientLeft):
            await run_while_connected(receive, work())

    asyncio.run(client())
    assert ended
