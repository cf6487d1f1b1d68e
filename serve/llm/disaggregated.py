"""Disaggregated prefill: the worker that computes prompts for decode engines, and how such engines start."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ...model.config import ModelConfig
from ...model.transformer import Decoder
from ...sampling.params import SamplingParams
from ..engine.core.request import Request
from ..engine.startup.mesh import apart
from ..engine.startup.start import start_engine
from ..host.streams import warn
from ..kv.disagg.client import RemotePrefillClient
from ..kv.disagg.peer import RemoteKVPool, RemoteKVTier
from ..kv.disagg.server import PrefillServer
from ..kv.disagg.service import Ready
from ..kv.disagg.transport import transports
from ..kv.offload.tier import Content, Key, key_of
from ..kv.offload.tiering import KVOffloader
from ..options.checks import GIB, place_of, places_of
from ..options.engine import OUTBOX, EngineOptions
from ..runtime.compiled.transfers import MOST
from .driver import DrivenRequest, Driver, StreamChunk
from .request_group import RequestGroup
from .session import Session

ONE = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)


class PrefillWorker:
    """Computes prompts in a session's engine, as requests of one token, and offers their pages in its tiers.

    A prompt is reported once its pages are in a tier. No method but `fetch` and `close` waits.
    """

    def __init__(self, options: EngineOptions, vocab_size: int):
        self.options, self.words = options, range(vocab_size)
        self.room, self.is_here = int(options.host_space * GIB), False
        self.realm: bytes | None = None
        self._numbers = itertools.count()
        self._prompts: dict[int, tuple[DrivenRequest, Ready]] = {}  # under way
        self._offers: deque[tuple[list[bytes], list[bytes], Ready]] = deque()  # names to offer, and all names
        self._ended = False

    def own(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Set the realm of its pages."""
        self.realm = realm

    def serve(self, session: Session, driver: Callable[..., Driver] = Driver) -> None:
        """Compute prompts in a session's engine, which `driver` steps."""
        tiers = session.engine.tiers
        assert isinstance(tiers, KVOffloader)
        self.session, self._tiers, self.is_here = session, tiers, True
        self._driver = driver(session, failed=self._failed, paused=self._give_up)

    def begin(self, prompt: Sequence[int], ready: Ready) -> int:
        number = next(self._numbers)
        self._driver.call(partial(self._begin, number, list(prompt), ready))
        return number

    def leave(self, number: int) -> None:
        self._driver.call(partial(self._leave, number))

    def fetch(self, key: Key) -> Content | None:
        return self._tiers.mover.tier.fetch(key)

    def renew(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """A decode engine in this process has other weights; it gets pages if the realms are equal."""
        self.is_here = not self._ended and realm is not None and realm == self.realm

    def close(self) -> None:
        self._ended = True
        self._driver.stop()
        self._end()

    # ------------------------------------------------------------ in the driver's thread

    def _begin(self, number: int, prompt: list[int], ready: Ready) -> None:
        if self._ended or not self._is_allowed(prompt):
            return ready([])
        (group,) = self.session.groups_of([partial(self._group, prompt, number)])
        prompt_of = DrivenRequest(group, lambda: [group] * group.finished, partial(self._computed, number))
        self._prompts[number] = prompt_of, ready
        self._driver.begin(prompt_of)

    def _is_allowed(self, prompt: list[int]) -> bool:
        most = self.session.engine.sizes.max_model_len
        return 0 < len(prompt) < most and all(token in self.words for token in prompt)

    def _group(self, prompt: list[int], number: int, id: str) -> RequestGroup:
        patience = self.options.patience(awaited=True)
        request = Request(id, prompt, ONE, seed=0, end=len(prompt) + 1, arrival=number, patience=patience)
        return RequestGroup(id, None, [request])

    def _leave(self, number: int) -> None:
        if (found := self._prompts.pop(number, None)) is not None:
            self._driver.leave(found[0])

    def _give_up(self) -> None:
        """The engine sleeps: decode engines compute their prompts themselves."""
        for number, (_, ready) in list(self._prompts.items()):
            self._leave(number)
            ready([])

    def _failed(self, error: Exception, prompts: Sequence[DrivenRequest]) -> None:
        warn(f"no prompts are computed for others any more: {type(error).__name__}: {error}")
        self._end()

    def _end(self) -> None:
        self.is_here, self._ended = False, True
        for *_, ready in [*self._prompts.values(), *self._offers]:
            ready([])
        self._prompts.clear()
        self._offers.clear()

    def _computed(self, number: int, chunk: StreamChunk) -> None:
        """Offer the pages of a prompt, within the turn of its step."""
        if (found := self._prompts.pop(number, None)) is None:
            return
        (request,) = chunk.flow.group.requests
        names = list(self.session.engine.scheduler.usable(request))
        self._offers.append((names, names, found[1]))
        if len(self._offers) == 1:  # else `_offer_rest` is among the orders
            self._offer()

    def _offer(self) -> None:
        """Copy computed pages into the tiers, as many as may be in flight; the rest before the next step."""
        engine, tiers = self.session.engine, self._tiers
        windows = range(len(engine.tables.pools))
        while self._offers:
            rest, names, ready = self._offers.popleft()
            if rest and not all(tiers.mover.has_room(g, min(len(rest), MOST)) for g in windows):
                self._offers.appendleft((rest, names, ready))
                return self._driver.call(self._offer_rest)
            for g, pool in enumerate(engine.tables.pools):
                found = {key_of(name, g): pool.find(name) for name in rest[:MOST]}
                tiers.keep(engine.cache, g, {key: page for key, page in found.items() if page is not None})
            if len(rest) > MOST:
                self._offers.appendleft((rest[MOST:], names, ready))
            else:
                tiers.mover.then(partial(self._report, names, ready))

    def _offer_rest(self) -> None:
        if self._ended:
            return
        if not self._prompts:
            self._tiers.mover.wait()  # until some of the copies in flight are done
        with self.session.turn():
            self._offer()

    def _report(self, names: Sequence[bytes], ready: Ready) -> None:
        tiers = self._tiers
        keys = (key_of(name, g) for name in names for g in range(len(tiers.tables.pools)))
        ready([key for key in keys if tiers.mover.tier.has(key)])


def started(config: ModelConfig, params: Decoder, options: EngineOptions) -> tuple[Session, ExitStack]:
    """Start an engine in its `kv_role`; return its session, and what to close with it."""
    closing = ExitStack()
    with closing:
        if options.kv_role is None:
            session = Session(start_engine(config, params, options))
        else:
            begin = {"both": begin_both, "prefill": begin_prefill, "decode": begin_decode}[options.kv_role]
            session = begin(config, params, options, closing)
        return session, closing.pop_all()


def begin_prefill(
    config: ModelConfig, params: Decoder, options: EngineOptions, closing: ExitStack
) -> Session:
    """Start an engine that computes prompts for decode engines too, which reach it at an address."""
    ways = transports(options.kv_transport)
    server = PrefillServer(place_of(str(options.kv_address)), ways, options.cluster_key_file)
    closing.callback(server.close)
    session = Session(start_engine(config, params, options, on_realm=server.renew))
    prefills = PrefillWorker(options, config.vocab_size)
    prefills.serve(session)
    closing.callback(prefills.close)
    server.serve(prefills)
    return session


def begin_decode(config: ModelConfig, params: Decoder, options: EngineOptions, closing: ExitStack) -> Session:
    """Start an engine whose prompts are computed by the engines at `kv_address`."""
    tiers, ways = {}, transports(options.kv_transport)
    for address, place in places_of(str(options.kv_address)).items():
        client = RemotePrefillClient(place, ways, key_file=options.cluster_key_file)
        closing.callback(client.close)
        tiers[address] = RemoteKVTier(client, options.kv_transfer_timeout)
    return Session(start_engine(config, params, options, RemoteKVPool(tiers)))


def begin_both(config: ModelConfig, params: Decoder, options: EngineOptions, closing: ExitStack) -> Session:
    """Start two engines, on disjoint devices or on the same."""
    first, second = options.prefill_devices or 0, options.decode_devices or 0
    alone = replace(options, kv_role=None, prefill_devices=None, decode_devices=None)
    ours = replace(alone, tensor_parallel_size=first or 1, swap_space=options.swap_space or OUTBOX)
    theirs = replace(alone, tensor_parallel_size=second or 1)
    prefills = PrefillWorker(ours, config.vocab_size)
    there = apart(config, params, range(first)) if first else params
    session = Session(start_engine(config, there, ours, on_realm=prefills.own))
    closing.callback(session.close)
    prefills.serve(session)
    closing.callback(prefills.close)
    here = apart(config, params, range(first, first + second)) if second else params
    return Session(
        start_engine(config, here, theirs, peer=RemoteKVTier(prefills, options.kv_transfer_timeout))
    )
