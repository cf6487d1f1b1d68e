"""Tiers without a device: a mover that works when it is told to, and pages of the fake device as leaves."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from fakes.device import BROKEN, Cell, Donated, FakeExecutor

from duetto import LLM
from duetto.serve.engine.core.engine import Engine
from duetto.serve.kv.offload.host import HostTier
from duetto.serve.kv.offload.mover import PageMover
from duetto.serve.kv.offload.page_finder import KVOffloader
from duetto.serve.kv.offload.tier import PageContent, PageKey, TierChain
from duetto.serve.runtime.compiled.transfers import padded_count

PHASES = "prefill", "decode"


class Copied:
    """A leaf [1,n,W,4] of cells on its way to the host; those of a broken device do not arrive."""

    def __init__(self, value: np.ndarray, broken: bool):
        self.value, self.broken, self.shape = value, broken, value.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self.broken:
            raise BROKEN("INTERNAL: the fake device had failed")
        return self.value


class FakeTransfers:
    """Copies of the fake device's pages: a cell is its position, token, phase and length."""

    def __init__(self, executor: FakeExecutor):
        self.sizes, self.windows = executor.sizes, range(len(executor.windows))
        self.page_bytes = [16 * self.sizes.page_size] * len(self.windows)

    def abstract_leaves(self, window: int, n: int) -> tuple[jax.ShapeDtypeStruct]:
        return (jax.ShapeDtypeStruct((1, n, self.sizes.page_size, 4), np.int32),)

    def gather(self, cache: Donated, window: int, pages: Sequence[int]) -> tuple[Copied]:
        assert not cache.taken
        found = np.full((1, padded_count(len(pages)), self.sizes.page_size, 4), -9, np.int32)
        for i, page in enumerate(pages):
            for offset in range(self.sizes.page_size):
                position, token, phase, long = cache.value.cells[window, page, offset]
                found[0, i, offset] = position, token, PHASES.index(phase), long
        return (Copied(found, cache.value.broken),)

    def copy_to_device(self, window: int, leaves: Any) -> Any:
        return leaves

    def scatter(self, cache: Donated, window: int, leaves: Any, pages: Sequence[int | None]) -> Donated:
        value = cache.take()
        for i, page in enumerate(pages):
            for offset in range(self.sizes.page_size) if page is not None else ():
                position, token, phase, long = leaves[0][0, i, offset].tolist()
                value.cells[window, page, offset] = Cell(position, token, PHASES[phase], bool(long))
        return Donated(value)


class Forgetful(HostTier):
    """A tier that loses every so many pages between `has` and `fetch`."""

    def __init__(self, max_bytes: int, every: int | None):
        super().__init__(max_bytes)
        self.every, self.asked = every, 0

    def fetch(self, key: PageKey) -> PageContent | None:
        self.asked += 1
        if self.every and self.asked % self.every == 0:
            self.nbytes -= len(self._pages.pop(key, b""))
        return super().fetch(key)


class HandMover(PageMover):
    """A mover without a thread: `work` does some of its jobs."""

    def start(self) -> None: ...
    def close(self) -> None: ...

    def work(self, most: int = 1_000_000) -> None:
        for _ in range(min(most, len(self._jobs))):
            job = self._jobs.get()
            assert job is not None
            try:
                job()
            except BROKEN:
                continue

    def wait_for_jobs(self) -> None:
        self.work()


def attach(
    engine: Engine, executor: FakeExecutor, pages: int, every: int | None = None, late: bool = False
) -> HandMover:
    """Give an engine over a fake device a tier for so many pages, of which every so many cannot be fetched,
    or all come too late; fetching always pays."""

    def reopen(params: Any) -> TierChain:
        return TierChain([Forgetful(pages * 16 * executor.sizes.page_size, every)])

    mover = HandMover(reopen(None), cast(Any, FakeTransfers(executor)), reopen)
    engine.attach_mover(mover)
    assert isinstance(engine.page_finder, KVOffloader)
    seconds = -1.0 if late else 3600.0
    engine.page_finder.patience_seconds = lambda pages: seconds  # type: ignore[method-assign]
    engine.page_finder.token_seconds, engine.page_finder.wait_for_pages = lambda: 3600.0, lambda: None  # type: ignore[method-assign]
    return mover


def always_fetching(llm: LLM) -> LLM:
    """Fetching pays, whatever was measured."""
    tiers = llm.engine.page_finder
    assert isinstance(tiers, KVOffloader)
    tiers.token_seconds = lambda: 3600.0
    return llm
