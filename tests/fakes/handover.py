"""Prefill engines without a device: a source that answers when it is told to, and a pair of engines over the
fake device with a connection between them."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from fakes.device import VOCAB, FakeExecutor
from fakes.engine import start
from fakes.tiers import FakeTransfers

from duetto.serve.engine.core.engine import Engine
from duetto.serve.kv.disagg.client import RemotePrefillClient
from duetto.serve.kv.disagg.remote_tiers import RemoteKVTier
from duetto.serve.kv.disagg.server import PrefillServer
from duetto.serve.kv.disagg.service import OnReady, PrefillService
from duetto.serve.kv.disagg.transport import PageTransport, make_transports
from duetto.serve.kv.offload.host import HostTier
from duetto.serve.kv.offload.mover import PageMover
from duetto.serve.kv.offload.tier import PageContent, PageKey, TierChain
from duetto.serve.llm.disaggregated import PrefillWorker
from duetto.serve.llm.session import Session
from duetto.serve.options.engine import EngineOptions

REALM, SOON = b"fake", 300.0
WAYS = make_transports(None)
SIZES = {"pages": 12, "page_size": 4, "max_model_len": 40, "seats": 2}


class FakeSource:
    """Has pages by key; prompts are answered by the test."""

    def __init__(self, room_bytes: int = 1000):
        self.room_bytes, self.is_connected = room_bytes, True
        self.pages: dict[PageKey, PageContent] = {}
        self.asked: list[tuple[tuple[int, ...], OnReady]] = []
        self.left: list[int] = []
        self.realm: bytes | None = None
        self.before: Callable[[], Any] = lambda: None  # each fetch

    def begin_prefill(self, prompt: Sequence[int], on_ready: OnReady, salt: bytes = b"") -> int:
        self.asked.append((tuple(prompt), on_ready))
        return len(self.asked) - 1

    def cancel_prefill(self, number: int) -> None:
        self.left.append(number)

    def fetch(self, key: PageKey) -> PageContent | None:
        self.before()
        return self.pages.get(key)

    def expect_realm(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        self.realm = realm


def soon(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


def tiered(
    engine: Engine, executor: FakeExecutor, chain: TierChain, peer: RemoteKVTier | None = None
) -> list[int]:
    """Give an engine over a fake device a mover at work; the bytes of its pages."""
    mover = PageMover(chain, cast(Any, FakeTransfers(executor)), lambda _: chain, peer)
    mover.start()
    engine.attach_mover(mover)
    return mover.transfers.page_bytes


class PrefillSide:
    """An engine that computes prompts behind a door, until it ends."""

    def __init__(
        self, port: int = 0, realm: bytes = REALM, ways: Mapping[str, PageTransport] = WAYS, **sizes: Any
    ):
        engine, executor = start(**(SIZES | sizes))
        page_bytes = tiered(engine, executor, TierChain([HostTier(1 << 20)]))
        self.door = PrefillServer(("127.0.0.1", port), ways)
        self.prefills = PrefillWorker(EngineOptions(swap_space=1), VOCAB)
        self.door.set_realm(realm, page_bytes)
        self.session = Session(engine)
        self.prefills.start_driver(self.session)
        self.door.serve(self.prefills)

    @property
    def port(self) -> int:
        return self.door.address[1]

    def end(self) -> None:
        self.door.close()
        self.prefills.close()
        self.session.close()


def decode_side(source: PrefillService, patience: float = SOON, **sizes: Any) -> Engine:
    """An engine whose prompts a source computes."""
    engine, executor = start(**(SIZES | sizes))
    peer = RemoteKVTier(source, patience)
    peer.expect_realm(REALM, tiered(engine, executor, TierChain([peer]), peer))
    return engine


def peer_of(engine: Engine) -> RemoteKVTier:
    peer = cast(Any, engine.page_finder).mover.remote_kv
    assert isinstance(peer, RemoteKVTier)
    return peer


def far_at(
    port: int, seconds: float = SOON, ways: Mapping[str, PageTransport] = WAYS, key_file: str | None = None
) -> RemotePrefillClient:
    return RemotePrefillClient(("127.0.0.1", port), ways, seconds, key_file)
