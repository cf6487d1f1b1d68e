"""Prefill and decode in engines of their own: who computes prompts for others, and how such engines start."""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from ...model.config import ModelConfig
from ...model.transformer import Decoder
from ...sampling.params import SamplingParams
from ..engine.core.request import Request
from ..engine.startup.mesh import apart
from ..engine.startup.start import start_engine
from ..host.store import warn
from ..host.threads import Orders, obey
from ..kv.disagg.client import RemotePrefillClient
from ..kv.disagg.nixl import NixlAgent
from ..kv.disagg.peer import RemoteKVTier
from ..kv.disagg.peers import RemoteKVPool
from ..kv.disagg.server import PrefillServer
from ..kv.disagg.service import Ready
from ..kv.offload.tier import Content, Key, key_of
from ..kv.offload.tiering import KVOffloader
from ..options.checks import GIB, place_of, places_of
from ..options.engine import OUTBOX, EngineOptions
from ..runtime.compiled.transfers import MOST
from .session import Session
from .ticket import RequestGroup

ONE = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)


class PrefillWorker:
    """Computes prompts in a session's engine, as requests of one token, and offers their pages in its tiers.

    One thread drives the engine for all of them. Pages are told of once they are in a tier.
    """

    def __init__(self, options: EngineOptions, vocab_size: int):
        self.options, self.words = options, range(vocab_size)
        self.room, self.is_here = int(options.host_space * GIB), False
        self.realm: bytes | None = None
        self._numbers = itertools.count()
        self._orders = Orders()
        self._under_way: dict[int, tuple[RequestGroup, Ready]] = {}
        self._offers: deque[tuple[list[bytes], list[bytes], Ready]] = deque()  # names to offer, and all names
        self._thread = threading.Thread(target=self._run, name="duetto-prefills", daemon=True)
        self._ended = False

    def own(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Its pages are of another realm from now on."""
        self.realm = realm

    def serve(self, session: Session) -> None:
        tiers = session.engine.tiers
        assert isinstance(tiers, KVOffloader)
        self._session, self._tiers, self.is_here = session, tiers, True
        self._thread.start()

    def begin(self, prompt: Sequence[int], ready: Ready) -> int:
        number = next(self._numbers)
        self._orders.put(partial(self._begin, number, list(prompt), ready))
        if self._ended:
            self._obey_last()
        return number

    def leave(self, number: int) -> None:
        self._orders.put(partial(self._leave, number))

    def fetch(self, key: Key) -> Content | None:
        return self._tiers.mover.tier.fetch(key)

    def renew(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Of an engine in the same process, which has other parameters now: pages are of one realm."""
        self.is_here = not self._ended and realm is not None and realm == self.realm

    def close(self) -> None:
        if self._thread.is_alive():
            self._orders.put(None)
            self._thread.join()

    # ------------------------------------------------------------ in its thread

    def _run(self) -> None:
        try:
            while obey(self._orders, wait=not (self._under_way or self._offers)):
                self._step()
        except Exception as error:  # noqa: BLE001 - whoever waits computes the prompts
            warn(f"no prompts are computed for others any more: {type(error).__name__}: {error}")
        self.is_here, self._ended = False, True
        for ready in [
            *(ready for _, ready in self._under_way.values()),
            *(offer[-1] for offer in self._offers),
        ]:
            ready([])
        self._obey_last()

    def _obey_last(self) -> None:
        """Who has asked at the end is told so."""
        with suppress(queue.Empty):
            while True:
                if (order := self._orders.get_nowait()) is not None:
                    order()

    def _begin(self, number: int, prompt: list[int], ready: Ready) -> None:
        if self._ended or not self._is_allowed(prompt):
            return ready([])
        (ticket,) = self._session.tickets_of([partial(self._ticket, prompt, number)])
        self._under_way[number] = ticket, ready
        self._session.submit([ticket])

    def _is_allowed(self, prompt: list[int]) -> bool:
        most = self._session.engine.sizes.max_model_len
        return 0 < len(prompt) < most and all(token in self.words for token in prompt)

    def _ticket(self, prompt: list[int], number: int, id: str) -> RequestGroup:
        patience = self.options.patience(awaited=True)
        request = Request(id, prompt, ONE, seed=0, end=len(prompt) + 1, arrival=number, patience=patience)
        return RequestGroup(id, None, [request])

    def _leave(self, number: int) -> None:
        if (found := self._under_way.pop(number, None)) is not None:
            self._session.drop([found[0]])

    def _step(self) -> None:
        with self._session.turn():
            engine = self._session.engine
            if engine.is_sleeping or engine.sleeper.discarded:
                self._give_up()
            elif self._under_way and engine.has_work:
                engine.step()
            for number, (ticket, ready) in list(self._under_way.items()):
                if ticket.finished:
                    (request,) = ticket.requests
                    names = list(engine.scheduler.usable(request))
                    self._offers.append((names, names, ready))
                    self._leave(number)
            self._offer()
        if self._offers and not self._under_way:
            self._tiers.mover.wait()  # until some of those that are on their way have gone

    def _give_up(self) -> None:
        """The engine sleeps: whoever asks computes its prompts."""
        for number, (_, ready) in list(self._under_way.items()):
            self._leave(number)
            ready([])

    def _offer(self) -> None:
        """Pages of prompts that are computed, as many as may be on their way to the host."""
        engine, tiers = self._session.engine, self._tiers
        windows = range(len(engine.tables.pools))
        while self._offers:
            left, names, ready = self._offers.popleft()
            if left and not all(tiers.mover.has_room(g, min(len(left), MOST)) for g in windows):
                return self._offers.appendleft((left, names, ready))
            for g, pool in enumerate(engine.tables.pools):
                found = {key_of(name, g): pool.find(name) for name in left[:MOST]}
                tiers.keep(engine.cache, g, {key: page for key, page in found.items() if page is not None})
            if len(left) > MOST:
                self._offers.appendleft((left[MOST:], names, ready))
            else:
                tiers.mover.then(partial(self._tell, names, ready))

    def _tell(self, names: Sequence[bytes], ready: Ready) -> None:
        tiers = self._tiers
        keys = (key_of(name, g) for name in names for g in range(len(tiers.tables.pools)))
        ready([key for key in keys if tiers.mover.tier.has(key)])


def started(config: ModelConfig, params: Decoder, options: EngineOptions) -> tuple[Session, ExitStack]:
    """The session of an engine that plays its part in `kv_role`, and what ends with it."""
    closing = ExitStack()
    with closing:
        session = begin(config, params, options, closing)
        return session, closing.pop_all()


def begin(config: ModelConfig, params: Decoder, options: EngineOptions, closing: ExitStack) -> Session:
    match options.kv_role:
        case "both":
            return begin_both(config, params, options, closing)
        case "prefill":
            return begin_prefill(config, params, options, closing)
        case "decode":
            return begin_decode(config, params, options, closing)
    return Session(start_engine(config, params, options))


def begin_prefill(
    config: ModelConfig, params: Decoder, options: EngineOptions, closing: ExitStack
) -> Session:
    """An engine that others reach at an address, beside whatever else it serves."""
    door = PrefillServer(place_of(str(options.kv_address)), agent_of(options), options.cluster_key_file)
    closing.callback(door.close)
    session, prefills = (
        Session(start_engine(config, params, options, told=door.renew)),
        PrefillWorker(options, config.vocab_size),
    )
    prefills.serve(session)
    closing.callback(prefills.close)
    door.serve(prefills)
    return session


def begin_decode(config: ModelConfig, params: Decoder, options: EngineOptions, closing: ExitStack) -> Session:
    """An engine whose prompts are computed by those that it is told of."""
    tiers, agent = {}, agent_of(options)
    for address, place in places_of(str(options.kv_address)).items():
        far = RemotePrefillClient(place, agent=agent, key_file=options.cluster_key_file)
        closing.callback(far.close)
        tiers[address] = RemoteKVTier(far, options.kv_transfer_timeout)
    return Session(start_engine(config, params, options, RemoteKVPool(tiers)))


def agent_of(options: EngineOptions) -> NixlAgent | None:
    return NixlAgent() if options.kv_transport == "nixl" else None


def begin_both(config: ModelConfig, params: Decoder, options: EngineOptions, closing: ExitStack) -> Session:
    """Two engines, on two parts of the devices or on the same."""
    first, second = options.prefill_devices or 0, options.decode_devices or 0
    alone = replace(options, kv_role=None, prefill_devices=None, decode_devices=None)
    ours = replace(alone, tensor_parallel_size=first or 1, swap_space=options.swap_space or OUTBOX)
    theirs = replace(alone, tensor_parallel_size=second or 1)
    prefills = PrefillWorker(ours, config.vocab_size)
    there = apart(config, params, range(first)) if first else params
    session = Session(start_engine(config, there, ours, told=prefills.own))
    closing.callback(session.close)
    prefills.serve(session)
    closing.callback(prefills.close)
    here = apart(config, params, range(first, first + second)) if second else params
    return Session(
        start_engine(config, here, theirs, peer=RemoteKVTier(prefills, options.kv_transfer_timeout))
    )
