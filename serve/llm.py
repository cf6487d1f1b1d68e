"""The Python API: `LLM` loads a model and generates; names and results are those of vLLM's offline class."""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from jax.sharding import Mesh

from ..checkpoints.huggingface import GenerationDefaults
from ..model.compress import in_form
from ..model.config import ModelConfig
from ..model.transformer import Decoder
from ..sampling.params import SamplingParams
from .chat import Message, apply_chat
from .engine import Engine
from .explain import explain
from .hostmemory import give_back
from .intake import Intake, Prompt, is_one_prompt, params_for
from .interrupt import uninterrupted
from .keywords import engine_options
from .loading import DEMO, keep_compiled, load_folder, require_arrays, start_engine
from .options import EngineOptions
from .outputs import Delta, RequestOutput, Score, score_of
from .text import Tokenizer
from .ticket import Cursor, Ticket
from .vocabularies import EXPECTED


class LLM:
    """A model ready to generate.

    `model` is a Hugging Face folder or one written by `duetto convert` (default: the small model that ships with duetto), `dtype` one of "auto", "float32",
    "bfloat16", "float16", `tokenizer` another folder to take the tokenizer from. `mesh` spreads the model over the devices of its
    axis "tensor". `compilation_cache` is a directory for
    compiled programs, "auto" for one in the user's cache home, None leaves jax's own setting. Other keywords are those of EngineOptions.

    Raises ValueError (CheckpointError for a folder that cannot be loaded) or TypeError for an unknown option.
    All methods may be called from any thread; whoever waits for a result drives the engine for all.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        tokenizer: str | Path | None = None,
        mesh: Mesh | None = None,
        compilation_cache: str | Path | None = "auto",
        **options: Any,
    ):
        chosen = engine_options(options)
        keep_compiled(compilation_cache)
        folder = DEMO if model is None else Path(model)
        config, params, defaults = load_folder(folder, dtype, mesh, chosen.quantization)
        words = Tokenizer.from_folder(folder if tokenizer is None else tokenizer)
        if words is None and tokenizer is not None:
            raise ValueError(f"tokenizer {str(tokenizer)!r} has no {EXPECTED}")
        self._begin(config, params, words, defaults, chosen)

    @classmethod
    def from_params(
        cls,
        config: ModelConfig,
        params: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        eos_token_ids: Sequence[int] = (),
        compilation_cache: str | Path | None = "auto",
        **options: Any,
    ) -> "LLM":
        """An LLM over parameters that are already on their device, or sharded over several by NamedShardings.

        They are used as they are, without a copy, unless `quantization` says otherwise. The cache is split as the heads of the keys' projections are.
        """
        chosen = engine_options(options)
        keep_compiled(compilation_cache)
        llm = cls.__new__(cls)
        llm._begin(config, params, tokenizer, GenerationDefaults(tuple(eos_token_ids)), chosen)
        return llm

    def _begin(
        self,
        config: ModelConfig,
        params: Decoder,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults,
        options: EngineOptions,
    ) -> None:
        self.config, self.tokenizer, self.options = config, tokenizer, options
        self._defaults = defaults
        self._engine: Engine | None = start_engine(config, params, options)
        sizes = self._engine.sizes
        self._intake = Intake(
            config.vocab_size, sizes.max_model_len, options, tokenizer, defaults.eos_token_ids
        )
        self._tickets: dict[str, Ticket] = {}
        self._queued: dict[str, None] = {}  # those of them that `step` gives back, in order
        self._ids = itertools.count()
        self._lock = threading.RLock()

    # ------------------------------------------------------------ whole results

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Continuations of prompts, in their order. A prompt is text, token ids, or a mapping with either of them.

        One set of sampling parameters serves all, or a list has one for each. Raises before anything is run if one of
        the prompts or parameters is not allowed.
        """
        prompts = [prompts] if is_one_prompt(prompts) else list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = params_for(prompts, sampling_params)
        tickets = [self._ticket(p, s, priority) for p, s in zip(prompts, params, strict=True)]
        return self._finish(tickets, use_tqdm)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Replies to one conversation or to several. Raises ChatTemplateError where the template refuses one."""
        one = not (isinstance(messages, list) and messages and isinstance(messages[0], list))
        prompts = [
            self.chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in ([messages] if one else messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(self, messages: list[Message], **options: Any) -> list[int]:
        """A conversation as token ids; options are those of `chat.render_for`."""
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer: chat needs one")
        return apply_chat(self.tokenizer, messages, **options)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: str | Sequence[int] | Sequence[str | Sequence[int]] | None = None,
    ) -> list[Score]:
        """Log-probabilities of each prompt's tokens after its first, or of its continuation alone (teacher forcing)."""
        prompts = [prompts] if is_one_prompt(prompts) else list(prompts)
        ids = [self._intake.tokens(prompt)[1] for prompt in prompts]
        if continuations is None:
            ends, starts = [[] for _ in ids], [1] * len(ids)
        else:
            given = [continuations] if is_one_prompt(continuations) else continuations
            ends, starts = [self._continuation(c) for c in given], [len(a) for a in ids]
        if len(ends) != len(ids):
            raise ValueError(f"{len(ids)} prompts have {len(ends)} continuations; there must be one for each")
        if 0 in starts:
            raise ValueError(
                "a prompt is empty: its continuation's first token would have no log-probability"
            )
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        results = self.generate([a + b for a, b in zip(ids, ends, strict=True)], params, use_tqdm=False)
        return [score_of(result, start) for result, start in zip(results, starts, strict=True)]

    def _continuation(self, text: str | Sequence[int]) -> list[int]:
        if not isinstance(text, str):
            return list(text)
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer: give continuations as token ids")
        return self.tokenizer.encode(text, add_special_tokens=False)

    # ------------------------------------------------------------ streams

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> Generator[Delta]:
        """Pieces of the continuation as they are generated; the request begins with the first piece that is asked for.

        Leaving the loop early aborts it. Raises ValueError or TypeError at once for what is not allowed.
        """
        ticket = self._ticket(prompt, sampling_params or self.get_default_sampling_params(), priority)
        return self._pieces(ticket)

    async def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[Delta]:
        """`stream` for an event loop: steps run in a worker thread. Closing or cancelling it aborts the request."""
        pieces = await asyncio.to_thread(self.stream, prompt, sampling_params, priority=priority)
        coming: asyncio.Future[Delta | None] | None = None
        try:
            while True:
                coming = asyncio.ensure_future(asyncio.to_thread(next, pieces, None))
                if (piece := await asyncio.shield(coming)) is None:
                    return
                yield piece
        finally:
            if coming is not None:  # a cancelled task's step still runs in its thread
                await asyncio.gather(coming, return_exceptions=True)
            await asyncio.to_thread(pieces.close)

    def _pieces(self, ticket: Ticket) -> Generator[Delta]:
        """First whatever another caller's steps have brought, and a step only where there is nothing."""
        cursor = Cursor(ticket)
        try:
            self._submit([ticket])
            while not cursor.at_end:
                with self._turn():
                    engine, pieces = self._open_engine(), cursor.take()
                    if not pieces:
                        engine.step()
                yield from pieces
        finally:
            self._drop([ticket])

    # ------------------------------------------------------------ one step at a time

    def add_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, priority: int = 0
    ) -> str:
        """Queue a request for `step`; smaller priorities go first. Raises ValueError for an id that is in use."""
        with self._turn():
            ticket = self._ticket(prompt, params, priority, request_id)
            self._submit([ticket])
            self._queued[ticket.id] = None
        return ticket.id

    def step(self) -> list[RequestOutput]:
        """Advance all requests by one step; gives those queued with `add_request` that have finished since."""
        with self._turn():
            if self._open_engine().has_work:
                self._advance()
            finished = [ticket for id in self._queued if (ticket := self._tickets[id]).finished]
            self._drop(finished)
        return [self._intake.output(ticket) for ticket in finished]

    def has_unfinished_requests(self) -> bool:
        """Whether requests queued with `add_request` are still to be given back by `step`."""
        return bool(self._queued)

    def abort(self, request_id: str) -> None:
        """End a request now; what it has generated is its result, with finish reason "abort". An unknown id is none."""
        with self._turn():
            ticket = self._tickets.get(request_id)
            for request in ticket.requests if ticket else ():
                self._open_engine().abort(request)

    # ------------------------------------------------------------ the engine

    def update_params(self, params: Decoder) -> None:
        """Serve other weights of the same shapes from now on, without a copy or a compilation.

        Raises RuntimeError while requests are unfinished, ValueError where a shape, dtype or sharding differs, TypeError for
        parameters that are not on a device.
        """
        with self._turn():
            require_arrays(params)
            params = in_form(params, self.options.quantization, params.embed.dtype)
            self._open_engine().update_params(params)

    @property
    def params(self) -> Decoder:
        """The weights being served, as they lie on the device."""
        return self._open_engine().params

    def report(self, explained: bool = False) -> dict[str, Any]:
        """What was done so far: latencies in seconds, tokens per second, padding, cache, compilations.

        `explained` adds, as text, a table of the programs that ran: operations, bytes, the floor of their time on this device, and
        measured medians.
        """
        engine = self._open_engine()
        return engine.report() | ({"explained": explain(engine)} if explained else {})

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's authors recommend in generation_config.json, else the usual defaults."""
        return SamplingParams.from_dict(self._defaults.sampling)

    def close(self) -> None:
        """Abort what runs and give the device's memory back."""
        with self._turn():
            self._drop(list(self._tickets.values()))
            self._engine = None
            give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    def _ticket(self, prompt: Prompt, params: SamplingParams, priority: int, id: str | None = None) -> Ticket:
        if id is None:
            id = next(new for n in self._ids if (new := str(n)) not in self._tickets)
        elif id in self._tickets:
            raise ValueError(f"request_id {id!r} is in use")
        return self._intake.ticket(id, prompt, params, priority)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One caller at a time, and none is interrupted while the engine is between two states."""
        with uninterrupted(), self._lock:
            yield

    def _submit(self, tickets: list[Ticket]) -> None:
        with self._turn():
            engine = self._open_engine()
            for ticket in tickets:
                self._tickets[ticket.id] = ticket
                for request in ticket.requests:
                    engine.submit(request)

    def _advance(self) -> None:
        with self._turn():
            self._open_engine().step()

    def _drop(self, tickets: list[Ticket]) -> None:
        """Forget tickets, and end those that have not ended."""
        with self._turn():
            engine = self._engine
            for ticket in tickets:
                for request in ticket.requests if engine is not None else ():
                    engine.abort(request)
                self._tickets.pop(ticket.id, None)
                self._queued.pop(ticket.id, None)

    def _finish(self, tickets: list[Ticket], use_tqdm: bool) -> list[RequestOutput]:
        """Run tickets to their end; an interrupt aborts what is left of them."""
        try:
            self._submit(tickets)
            with progress(len(tickets), use_tqdm) as bar:
                left = tickets
                while left:
                    self._advance()
                    bar.update(len(left) - len(left := [t for t in left if not t.finished]))
        finally:
            self._drop(tickets)
        return [self._intake.output(ticket) for ticket in tickets]


def progress(total: int, shown: bool):
    from tqdm import tqdm

    return tqdm(total=total, desc="requests", disable=not shown, dynamic_ncols=True)
