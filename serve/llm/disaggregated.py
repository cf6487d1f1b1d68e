"""Disaggregated prefill: the worker that computes prompts for decode engines, and the start of both kinds of
engines."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ...model.config import ModelConfig
from ...model.transformer import Decoder
from ...sampling.params import SamplingParams
from ..engine.core.request import Request
from ..engine.startup.mesh import place_on_device_range
from ..engine.startup.start import start_engine
from ..host.streams import warn_once
from ..kv.disagg.client import RemotePrefillClient
from ..kv.disagg.remote_tiers import RemoteKVPool, RemoteKVTier
from ..kv.disagg.server import PrefillServer
from ..kv.disagg.service import OnReady
from ..kv.disagg.transport import make_transports
from ..kv.offload.page_finder import KVOffloader
from ..kv.offload.tier import PageContent, PageKey, page_key
from ..options.checks import GIB, parse_kv_address, parse_kv_addresses
from ..options.engine import OUTBOX_GIB, EngineOptions
from ..runtime.compiled.transfers import MAX_COPY_PAGES
from .driver import Driver
from .mailbox import Delivery
from .session import Session
from .subscription import Subscription

ONE_TOKEN_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)


class PrefillWorker:
    """Computes prompts in a session's engine, as requests of one token, and offers their pages in its tiers.

    `on_ready` of a prompt is called once its pages are in a tier. Only `fetch` and `close` wait. It reads its
    subscriptions itself (`mailbox.Reader`).
    """

    loop = None

    def __init__(self, options: EngineOptions, vocab_size: int):
        self.options, self.vocabulary = options, range(vocab_size)
        self.room_bytes, self.is_connected = int(options.host_space * GIB), False
        self.realm: bytes | None = None
        self._numbers = itertools.count()
        self._prompts: dict[int, tuple[Subscription, OnReady]] = {}  # under way
        # hashes of the pages that are still to be offered, and of all pages
        self._offers: deque[tuple[list[bytes], list[bytes], OnReady]] = deque()
        self._has_ended = False

    def set_page_realm(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Set the realm of the pages that this worker computes."""
        self.realm = realm

    def start_driver(self, session: Session, driver: Callable[..., Driver] = Driver) -> None:
        """Begin to compute prompts in a session's engine. `driver` makes the driver that steps it."""
        tiers = session.engine.page_finder
        assert isinstance(tiers, KVOffloader)
        self.session, self._tiers, self.is_connected = session, tiers, True
        self._driver = driver(session, on_failure=self._on_failure, on_pause=self._abandon_prompts)

    def begin_prefill(self, prompt: Sequence[int], on_ready: OnReady, salt: bytes = b"") -> int:
        number = next(self._numbers)
        self._driver.call_in_thread(partial(self._begin_prompt, number, list(prompt), on_ready, salt))
        return number

    def cancel_prefill(self, number: int) -> None:
        self._driver.call_in_thread(partial(self._drop_prompt, number))

    def fetch(self, key: PageKey) -> PageContent | None:
        return self._tiers.mover.tier.fetch(key)

    def expect_realm(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Note that the decode engine in this process has other weights. It gets pages if the realms are
        equal."""
        self.is_connected = not self._has_ended and realm is not None and realm == self.realm

    def close(self) -> None:
        self._has_ended = True
        self._driver.stop()
        self._stop_serving()

    # ------------------------------------------------------------ in the driver's thread

    def _begin_prompt(self, number: int, prompt: list[int], on_ready: OnReady, salt: bytes) -> None:
        if self._has_ended or not self._is_valid_prompt(prompt):
            return on_ready([])
        subscription = Subscription([self._make_request(number, prompt, salt)])
        self._prompts[number] = subscription, on_ready
        self._driver.submit(subscription, self)

    def _is_valid_prompt(self, prompt: list[int]) -> bool:
        max_model_len = self.session.engine.sizes.max_model_len
        return 0 < len(prompt) < max_model_len and all(token in self.vocabulary for token in prompt)

    def _make_request(self, number: int, prompt: list[int], salt: bytes) -> Request:
        return Request(
            id="",
            prompt=prompt,
            params=ONE_TOKEN_PARAMS,
            seed=0,
            end=len(prompt) + 1,
            arrival=number,
            max_prefill_delay=self.options.prefill_delay(is_awaited=True),
            cache_salt=salt,
        )

    def _drop_prompt(self, number: int) -> None:
        if (entry := self._prompts.pop(number, None)) is not None:
            self._driver.drop(entry[0])

    def _abandon_prompts(self) -> None:
        """Report all prompts without pages, since the engine sleeps. Decode engines then compute them."""
        for number, (_, on_ready) in list(self._prompts.items()):
            self._drop_prompt(number)
            on_ready([])

    def _on_failure(self, error: Exception) -> None:
        warn_once(f"no prompts are computed for others any more: {type(error).__name__}: {error}")
        self._stop_serving()

    def _stop_serving(self) -> None:
        self.is_connected, self._has_ended = False, True
        for *_, on_ready in [*self._prompts.values(), *self._offers]:
            on_ready([])
        self._prompts.clear()
        self._offers.clear()

    def collect(self, subscription: Subscription, is_wanted: bool = False) -> list[Any]:
        """Return no outputs: only the end of a prompt matters."""
        return []

    def put(self, delivery: Delivery) -> None:
        """Offer the pages of a computed prompt, before the next step."""
        (request,) = delivery.subscription.requests
        if (entry := self._prompts.pop(request.arrival, None)) is None:
            return
        hashes = list(self.session.engine.scheduler.prefix_hashes(request))
        self._offers.append((hashes, hashes, entry[1]))
        if len(self._offers) == 1:  # else `_copy_remaining_pages` is among the orders
            self._copy_pages_to_tiers()

    def _copy_pages_to_tiers(self) -> None:
        """Copy computed pages into the tiers, as many as may be in flight. The rest follows before the next
        step."""
        engine, tiers = self.session.engine, self._tiers
        windows = range(len(engine.tables.pools))
        while self._offers:
            rest, hashes, on_ready = self._offers.popleft()
            if rest and not all(tiers.mover.has_room(g, min(len(rest), MAX_COPY_PAGES)) for g in windows):
                self._offers.appendleft((rest, hashes, on_ready))
                return self._driver.call_in_thread(self._copy_remaining_pages)
            for g, pool in enumerate(engine.tables.pools):
                pages = {page_key(page_hash, g): pool.find(page_hash) for page_hash in rest[:MAX_COPY_PAGES]}
                tiers.store_pages(
                    engine.cache, g, {key: page for key, page in pages.items() if page is not None}
                )
            if len(rest) > MAX_COPY_PAGES:
                self._offers.appendleft((rest[MAX_COPY_PAGES:], hashes, on_ready))
            else:
                tiers.mover.submit_job(partial(self._report_pages, hashes, on_ready))

    def _copy_remaining_pages(self) -> None:
        if self._has_ended:
            return
        if not self._prompts:
            self._tiers.mover.wait_for_jobs()  # until some of the copies in flight are done
        with self.session.hold_engine():
            self._copy_pages_to_tiers()

    def _report_pages(self, hashes: Sequence[bytes], on_ready: OnReady) -> None:
        tiers = self._tiers
        keys = (page_key(page_hash, g) for page_hash in hashes for g in range(len(tiers.tables.pools)))
        on_ready([key for key in keys if tiers.mover.tier.has(key)])


def start_session(config: ModelConfig, params: Decoder, options: EngineOptions) -> tuple[Session, ExitStack]:
    """Start the engine, or engines, of a `kv_role`. Returns the session, and a stack that closes their
    parts."""
    closing = ExitStack()
    with closing:
        if options.kv_role is None:
            session = Session(start_engine(config, params, options))
        else:
            begin_role = {
                "both": start_both_sessions,
                "prefill": start_prefill_session,
                "decode": start_decode_session,
            }[options.kv_role]
            session = begin_role(config, params, options, closing)
        return session, closing.pop_all()


def start_prefill_session(
    config: ModelConfig, params: Decoder, options: EngineOptions, closing: ExitStack
) -> Session:
    """Start an engine that also computes prompts for decode engines. They reach it at `kv_address`."""
    transport_list = make_transports(options.kv_transport)
    server = PrefillServer(
        parse_kv_address(str(options.kv_address)), transport_list, options.cluster_key_file
    )
    closing.callback(server.close)
    session = Session(start_engine(config, params, options, on_realm=server.set_realm))
    prefills = PrefillWorker(options, config.vocab_size)
    prefills.start_driver(session)
    closing.callback(prefills.close)
    server.serve(prefills)
    return session


def start_decode_session(
    config: ModelConfig, params: Decoder, options: EngineOptions, closing: ExitStack
) -> Session:
    """Start an engine whose prompts are computed by the prefill engines at `kv_address`."""
    tiers, transport_list = {}, make_transports(options.kv_transport)
    for address, endpoint in parse_kv_addresses(str(options.kv_address)).items():
        client = RemotePrefillClient(endpoint, transport_list, key_file=options.cluster_key_file)
        closing.callback(client.close)
        tiers[address] = RemoteKVTier(client, options.kv_transfer_timeout)
    return Session(start_engine(config, params, options, RemoteKVPool(tiers)))


def start_both_sessions(
    config: ModelConfig, params: Decoder, options: EngineOptions, closing: ExitStack
) -> Session:
    """Start a prefill engine and a decode engine in this process, on disjoint devices or on the same. Returns
    the decode engine's session."""
    num_prefill_devices, num_decode_devices = options.prefill_devices or 0, options.decode_devices or 0
    single_options = replace(options, kv_role=None, prefill_devices=None, decode_devices=None)
    prefill_options = replace(
        single_options,
        tensor_parallel_size=num_prefill_devices or 1,
        swap_space=options.swap_space or OUTBOX_GIB,
    )
    decode_options = replace(single_options, tensor_parallel_size=num_decode_devices or 1)
    prefills = PrefillWorker(prefill_options, config.vocab_size)
    prefill_params = (
        place_on_device_range(config, params, range(num_prefill_devices)) if num_prefill_devices else params
    )
    session = Session(start_engine(config, prefill_params, prefill_options, on_realm=prefills.set_page_realm))
    closing.callback(session.close)
    prefills.start_driver(session)
    closing.callback(prefills.close)
    decode_params = (
        place_on_device_range(
            config, params, range(num_prefill_devices, num_prefill_devices + num_decode_devices)
        )
        if num_decode_devices
        else params
    )
    return Session(
        start_engine(
            config,
            decode_params,
            decode_options,
            remote_kv=RemoteKVTier(prefills, options.kv_transfer_timeout),
        )
    )
