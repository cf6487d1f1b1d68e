"""Engines in processes of their own, on whatever runs processes, as one engine for a batch job.

A job knows them by the protocol of its engine. What a process that is lost had under way is given to another:
the tokens of a request do not depend on who computes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....lora.request import LoRARequest
from ....sampling.params import SamplingParams
from ...host.streams import tell
from ...llm.input_processor import InputProcessor
from ...options.engine import EngineOptions
from ...text.outputs import RequestOutput
from ...text.tokenizer.tokenizer import Tokenizer
from .worker import WorkerInfo, WorkerLost, WorkerRequest

LOSSES = 5  # workers that may be lost in a row, nothing having ended between


class WorkerBackend(Protocol):
    """Who runs workers. A worker and a promise are whatever it makes of them; where a worker is lost, `got`
    and `facts` raise WorkerLost."""

    def hire(self) -> Any: ...

    def facts(self, worker: Any) -> WorkerInfo: ...

    def take(self, worker: Any, new: Sequence[WorkerRequest]) -> Any:
        """A promise of what `Worker.take` gives."""
        ...

    def first(self, promises: Sequence[Any]) -> Any:
        """One that is kept, or broken."""
        ...

    def got(self, promise: Any) -> list[RequestOutput]: ...

    def report(self, worker: Any, explained: bool) -> dict[str, Any]: ...

    def close(self) -> None:
        """Let all workers go."""
        ...


@dataclass
class WorkerHandle:
    """A worker, the requests that it has, those that it has yet to be given, and what it has promised."""

    worker: Any
    has: dict[str, WorkerRequest] = field(default_factory=dict)
    new: list[WorkerRequest] = field(default_factory=list)
    promise: Any = None
    is_known: bool = False  # its products and its realm are those of the first

    @property
    def load(self) -> int:
        return len(self.has) + len(self.new)


class WorkerPool:
    """Several workers as one engine: `add_request` deals to whoever has least, `step` waits for the first
    that has something to tell.

    Raises RuntimeError where workers are lost again and again, and where one has another realm than the
    first, or multiplies otherwise.
    """

    def __init__(self, crew: WorkerBackend, count: int, tokenizer: Tokenizer | None, options: EngineOptions):
        self._crew, self.tokenizer = crew, tokenizer
        self._hands = [WorkerHandle(crew.hire()) for _ in range(count)]
        self._facts = self._first_facts()
        facts = self._facts
        self._processor = InputProcessor(
            facts.vocab_size, facts.max_model_len, options, tokenizer, facts.eos_ids
        )
        self.lost = self._in_a_row = 0

    def _first_facts(self) -> WorkerInfo:
        try:
            return self._crew.facts(self._hands[0].worker)
        except WorkerLost as gone:
            raise RuntimeError(f"no worker could be started: {gone}") from None

    @property
    def longest_prompt(self) -> int:
        return self._processor.longest

    def add_request(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Raises ValueError or TypeError for what no worker could run."""
        self._processor.group(request_id, prompt, params)
        self._deal(WorkerRequest(request_id, prompt, params, lora_request))
        return request_id

    def _deal(self, asked: WorkerRequest) -> None:
        min(self._hands, key=lambda hand: hand.load).new.append(asked)

    def expect(self, requests: int) -> None:
        """Nothing: how many of them a worker will have is not known."""

    def step(self) -> list[RequestOutput]:
        """What has ended since the last time; nothing where a worker was lost, or needs longer."""
        for hand in self._hands:
            if hand.promise is None and hand.load:
                hand.promise = self._crew.take(hand.worker, hand.new)
                hand.has |= {asked.id: asked for asked in hand.new}
                hand.new = []
        promises = [hand.promise for hand in self._hands if hand.promise is not None]
        if not promises:
            return []
        first = self._crew.first(promises)
        hand = next(hand for hand in self._hands if hand.promise is first)
        hand.promise = None
        try:
            ended = self._crew.got(first)
            self._check(hand)
        except WorkerLost as gone:
            self._replace(hand, gone)
            return []
        for output in ended:
            del hand.has[output.request_id]
        self._in_a_row = 0 if ended else self._in_a_row
        return ended

    def _replace(self, hand: WorkerHandle, gone: WorkerLost) -> None:
        """Another worker takes the place of one that is lost; all deal its requests again."""
        self.lost, self._in_a_row = self.lost + 1, self._in_a_row + 1
        if self._in_a_row > LOSSES:
            raise RuntimeError(f"{self._in_a_row} workers were lost, one after the other: {gone}")
        tell(f"duetto: a worker is lost ({gone}); another takes its place")
        asked = [*hand.has.values(), *hand.new]
        hand.worker, hand.has, hand.new, hand.is_known = self._crew.hire(), {}, [], False
        for one in asked:
            self._deal(one)

    def _check(self, hand: WorkerHandle) -> None:
        """Raises RuntimeError where bits may be others: an accelerator's compiler may choose otherwise, and
        the model's folder may have been written since the first worker's start."""
        if hand.is_known:
            return
        facts = self._crew.facts(hand.worker)
        if facts.products != self._facts.products:
            told = f"{facts.products}, the first one's {self._facts.products}"
            raise RuntimeError(f"a worker's products are {told}")
        if facts.realm != self._facts.realm:
            raise RuntimeError("a worker has other weights, versions or another machine than the first one")
        hand.is_known = True

    def report(self, explained: bool = False) -> dict[str, Any]:
        """That of the first worker, of so many."""
        about = {"workers": len(self._hands), "workers_lost": self.lost}
        try:
            return self._crew.report(self._hands[0].worker, explained) | about
        except WorkerLost:
            return about | {"products": self._facts.products}

    def save_cache(self, path: str) -> int:
        raise ValueError("save_cache is not allowed: the workers' caches are elsewhere")

    def close(self) -> None:
        self._processor.grammars.close()
        self._crew.close()
