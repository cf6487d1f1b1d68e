"""The Python API: `LLM` loads a model and generates; names and results are those of vLLM's offline class."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..checkpoints.huggingface import GenerationDefaults
from ..model.config import ModelConfig
from ..model.transformer import Decoder
from ..sampling.params import SamplingParams
from .chat import Message, apply_chat, render_for
from .engine import Engine
from .intake import Intake, Prompt, Ticket
from .loading import DEMO, keep_compiled, load_folder, start_engine
from .options import EngineOptions
from .outputs import Logprob, RequestOutput
from .text import Tokenizer

# What scripts for vLLM pass: another name for an option of ours, or a choice that we have made.
OTHER_NAMES = {"max_num_batched_tokens": "max_prefill_tokens", "block_size": "page_size"}
FIXED = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "enforce_eager": False,
    "trust_remote_code": False,
    "enable_chunked_prefill": True,
    "disable_log_stats": True,
    "quantization": None,
}


@dataclass(frozen=True)
class Delta:
    """What a stream adds: text and tokens since the last one; the last has a finish reason."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Score:
    """Teacher-forced natural-log probabilities of a text after the first of its tokens, or of a continuation."""

    token_ids: list[int]
    logprobs: list[float]

    @property
    def total(self) -> float:
        return sum(self.logprobs)


class LLM:
    """A model ready to generate.

    `model` is a Hugging Face folder (default: the small model that ships with duetto), `dtype` one of "auto", "float32",
    "bfloat16", "float16", `tokenizer` another folder to take the tokenizer from. `compilation_cache` is a directory for
    compiled programs, "auto" for one in the user's cache home, None for none. Other keywords are those of EngineOptions.

    Raises ValueError (CheckpointError for a folder that cannot be loaded) or TypeError for an unknown option.
    All methods may be called from any thread; whoever waits for a result drives the engine for all.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        tokenizer: str | Path | None = None,
        compilation_cache: str | Path | None = "auto",
        **options: Any,
    ):
        chosen = engine_options(options)
        keep_compiled(compilation_cache)
        folder = DEMO if model is None else Path(model)
        config, params, defaults = load_folder(folder, dtype)
        words = Tokenizer.from_folder(folder if tokenizer is None else tokenizer)
        self._begin(config, params, words, defaults, chosen, name=str(model) if model else "duetto-demo")

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
        """An LLM over parameters that are already on their device; they are used as they are, without a copy."""
        chosen = engine_options(options)
        keep_compiled(compilation_cache)
        llm = cls.__new__(cls)
        llm._begin(config, params, tokenizer, GenerationDefaults(tuple(eos_token_ids)), chosen, name="params")
        return llm

    def _begin(
        self,
        config: ModelConfig,
        params: Decoder,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults,
        options: EngineOptions,
        name: str,
    ) -> None:
        self.config, self.tokenizer, self.options, self.name = config, tokenizer, options, name
        self._defaults = defaults
        self._engine: Engine | None = start_engine(config, params, options)
        sizes = self._engine.sizes
        self._intake = Intake(
            config.vocab_size, sizes.max_model_len, options, tokenizer, defaults.eos_token_ids
        )
        self._tickets: dict[str, Ticket] = {}
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
        params = self._params_for(prompts, sampling_params)
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
        several = messages if messages and isinstance(messages[0], list) else [messages]
        prompts = [
            self.chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in several
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(
        self, messages: list[Message], *, chat_template: str | None = None, **options: Any
    ) -> list[int]:
        """A conversation as token ids; options are those of `chat.render_chat`."""
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer: chat needs one")
        if chat_template is None:
            return apply_chat(self.tokenizer, messages, **options)
        text = render_for(self.tokenizer, chat_template, messages, **options)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def score(
        self, prompts: Prompt | Sequence[Prompt], continuations: Sequence[str | list[int]] | None = None
    ) -> list[Score]:
        """Log-probabilities of each prompt's tokens after its first, or of its continuation alone (teacher forcing)."""
        prompts = [prompts] if is_one_prompt(prompts) else list(prompts)
        ids = [self._intake.tokens(prompt)[1] for prompt in prompts]
        ends = [[] for _ in ids] if continuations is None else [self._continuation(c) for c in continuations]
        if len(ends) != len(ids):
            raise ValueError(f"{len(ids)} prompts have {len(ends)} continuations; there must be one for each")
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        results = self.generate([a + b for a, b in zip(ids, ends, strict=True)], params, use_tqdm=False)
        return [scored(r, len(a) if b else 1) for r, a, b in zip(results, ids, ends, strict=True)]

    def _continuation(self, text: str | list[int]) -> list[int]:
        if not isinstance(text, str):
            return list(text)
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer: give continuations as token ids")
        return self.tokenizer.encode(text, add_special_tokens=False)

    # ------------------------------------------------------------ streams

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> Iterator[Delta]:
        """Pieces of the continuation as they are generated; leaving the loop early aborts the request."""
        ticket = self._ticket(prompt, sampling_params or self.get_default_sampling_params(), priority)
        self._submit([ticket])
        seen = [(0, 0)] * len(ticket.requests)
        try:
            while not ticket.finished:
                self._advance()
                yield from self._deltas(ticket, seen)
        finally:
            self._drop(ticket)

    async def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[Delta]:
        """`stream` for an event loop: steps run in a worker thread."""
        pieces = self.stream(prompt, sampling_params, priority=priority)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            await asyncio.to_thread(pieces.close)

    def _deltas(self, ticket: Ticket, seen: list[tuple[int, int]]) -> Iterator[Delta]:
        for index, request in enumerate(ticket.requests):
            tokens, chars = seen[index]
            new, text = request.outputs[tokens:], (request.text.text if request.text else "")[chars:]
            done = request.finished and tokens >= 0
            if new or text or done:
                seen[index] = (tokens + len(new), chars + len(text))
                yield Delta(index, text, new, request.finish_reason)
            if done:
                seen[index] = (-1, chars)

    # ------------------------------------------------------------ one step at a time

    def add_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, priority: int = 0
    ) -> str:
        """Queue a request for `step`; smaller priorities go first. Raises ValueError for an id that is in use."""
        ticket = self._ticket(prompt, params, priority, request_id)
        self._submit([ticket])
        return ticket.id

    def step(self) -> list[RequestOutput]:
        """Advance all requests by one step; gives those queued with `add_request` that have finished since."""
        with self._lock:
            if self._open_engine().has_work:
                self._advance()
            finished = [ticket for ticket in self._tickets.values() if ticket.finished]
            for ticket in finished:
                del self._tickets[ticket.id]
        return [self._intake.output(ticket) for ticket in finished]

    def has_unfinished_requests(self) -> bool:
        return bool(self._tickets)

    def abort(self, request_id: str) -> None:
        """End a request now; what it has generated is its result, with finish reason "abort"."""
        with self._lock:
            ticket = self._tickets.get(request_id)
            for request in ticket.requests if ticket else ():
                self._open_engine().abort(request)

    # ------------------------------------------------------------ the engine

    def update_params(self, params: Decoder) -> None:
        """Serve other weights of the same shapes from now on, without a copy or a compilation.

        Raises RuntimeError while requests are unfinished, ValueError where a shape or dtype differs.
        """
        with self._lock:
            self._open_engine().update_params(params)

    def report(self) -> dict[str, Any]:
        """What was done so far: latencies in seconds, tokens per second, padding, cache, compilations."""
        engine = self._open_engine()
        return engine.report()

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's authors recommend in generation_config.json, else the usual defaults."""
        return SamplingParams(**self._defaults.sampling)

    def close(self) -> None:
        """Abort what runs and give the device's memory back."""
        with self._lock:
            if self._engine is not None:
                for ticket in list(self._tickets.values()):
                    self._drop(ticket)
            self._engine = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    def _params_for(
        self, prompts: list[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            return [self.get_default_sampling_params()] * len(prompts)
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        if len(given) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts have {len(given)} sampling_params; there must be one for each"
            )
        return list(given)

    def _ticket(self, prompt: Prompt, params: SamplingParams, priority: int, id: str | None = None) -> Ticket:
        with self._lock:
            id = str(next(self._ids)) if id is None else id
            if id in self._tickets:
                raise ValueError(f"request_id {id!r} is in use")
            return self._intake.ticket(id, prompt, params, priority)

    def _submit(self, tickets: list[Ticket]) -> None:
        with self._lock:
            engine = self._open_engine()
            for ticket in tickets:
                self._tickets[ticket.id] = ticket
                for request in ticket.requests:
                    engine.submit(request)

    def _advance(self) -> None:
        with self._lock:
            self._open_engine().step()

    def _drop(self, ticket: Ticket) -> None:
        """Forget a ticket, and end it if it has not."""
        with self._lock:
            if self._engine is not None:
                for request in ticket.requests:
                    self._engine.abort(request)
            self._tickets.pop(ticket.id, None)

    def _finish(self, tickets: list[Ticket], use_tqdm: bool) -> list[RequestOutput]:
        """Run tickets to their end; an interrupt aborts what is left of them."""
        self._submit(tickets)
        try:
            with progress(len(tickets), use_tqdm) as bar:
                left = tickets
                while left:
                    self._advance()
                    bar.update(len(left) - len(left := [t for t in left if not t.finished]))
        finally:
            for ticket in tickets:
                self._drop(ticket)
        return [self._intake.output(ticket) for ticket in tickets]


def engine_options(given: Mapping[str, Any]) -> EngineOptions:
    """Keywords as options. Raises TypeError for a name that is none, ValueError for a value that is not allowed."""
    known, options = {f.name for f in fields(EngineOptions)}, {}
    for name, value in given.items():
        if name in FIXED:
            if value != FIXED[name]:
                raise ValueError(f"{name}={value!r} is not supported: only {FIXED[name]!r}")
        elif OTHER_NAMES.get(name, name) in known:
            options[OTHER_NAMES.get(name, name)] = value
        else:
            raise TypeError(
                f"unknown option {name!r}; known are dtype, tokenizer, {', '.join(sorted(known))}"
            )
    return replace(EngineOptions(), **options)


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a single prompt rather than several: text, a mapping, or a flat list of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return True
    return (
        len(prompts) > 0
        and not isinstance(prompts[0], (str, Mapping, Sequence))
        and not hasattr(prompts[0], "shape")
    )


def scored(result: RequestOutput, start: int) -> Score:
    entries: list[dict[int, Logprob] | None] = result.prompt_logprobs or []
    ids = result.prompt_token_ids[start:]
    return Score(ids, [entry[t].logprob for t, entry in zip(ids, entries[start:], strict=True) if entry])


def progress(total: int, shown: bool):
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="requests", disable=not shown, dynamic_ncols=True)
