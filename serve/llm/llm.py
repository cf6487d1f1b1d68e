"""The Python API: `LLM` loads a model and generates; names and results are those of vLLM's offline class."""

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from jax.sharding import Mesh

from ...checkpoints.families import FAMILIES
from ...checkpoints.families.family import Family
from ...checkpoints.folders import overridden
from ...checkpoints.generation import GenerationDefaults
from ...checkpoints.huggingface import read_model
from ...lora.request import Adapters, LoRARequest
from ...model.config import ModelConfig
from ...model.transformer import Decoder
from ...model.weights.prepared import unprepared
from ...sampling.params import SamplingParams
from ..engine.core.engine import Engine
from ..engine.lora.registry import registry_of
from ..engine.startup.folder import load_folder
from ..engine.startup.origin import NONE, Origin, ending
from ..engine.startup.start import on_devices, require_finite
from ..host.process import give_back, is_inherited, require_own_threads
from ..host.progress import telling
from ..host.threads import in_threads
from ..options.engine import EngineOptions
from ..options.keywords import engine_options
from ..planner.roofline.explain import explain
from ..runtime.compiled.jaxcache import keep_compiled
from ..runtime.multihost.rendezvous import join, together
from ..text.outputs import Delta, RequestOutput
from ..text.tokenizer.chat import Message
from ..text.tokenizer.tokenizer import Tokenizer
from . import disaggregated, snapshots, vllm, weights
from .audit.log import opened
from .bar import Tqdm, progress
from .intake import InputProcessor, Prompt, listed, one_each
from .tasks import embedding, likelihood, replying
from .ticket import RequestGroup


class LLM:
    """A model ready to generate.

    `model` is a Hugging Face folder, one written by `duetto convert`, or a model's id on the hub (default:
    the small model that ships with duetto), `tokenizer` another one to take the tokenizer from; `revision`,
    `tokenizer_revision`, `download_dir` and `hf_token` are for ids (`checkpoints.hub.resolve`). `dtype` is
    "auto", "float32" ("float"), "bfloat16", "float16" ("half"), or such a dtype of numpy, jax or torch.
    `mesh` is one of your own instead of what `tensor_parallel_size` makes. `compilation_cache` is a directory
    for compiled programs, "auto" for one in the user's cache home, None leaves jax's own setting. Other
    keywords are those of EngineOptions. With `nnodes` processes an LLM comes of it in rank 0 alone; the
    others serve it and end with it (SystemExit).

    Raises ValueError (CheckpointError for a folder that cannot be loaded) or TypeError for an unknown option.
    All methods may be called from any thread, but raise RuntimeError in a forked process.
    """

    @together
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: Any = "auto",
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        download_dir: str | Path | None = None,
        hf_token: str | bool | None = None,
        mesh: Mesh | None = None,
        compilation_cache: str | Path | None = "auto",
        **options: Any,
    ):
        require_own_threads()
        chosen = join(engine_options(options))
        SamplingParams.from_dict(chosen.recommended({}))
        keep_compiled(compilation_cache)
        where = {"download_dir": download_dir, "token": hf_token}
        revisions = {"revision": revision, "tokenizer_revision": tokenizer_revision} | where
        origin = Origin.of(model, tokenizer, weights=chosen.load_format != "dummy", **revisions)
        chosen = origin.settled(chosen, **where)
        with telling(chosen.use_tqdm_on_load), overridden(origin.model, chosen.hf_overrides) as folder:
            config, params, defaults = load_folder(folder, dtype, mesh, chosen)
            family = read_model(folder)[0]
        words, lacking = origin.words()
        self._begin(config, params, words, defaults, chosen, lacking, str(origin.model), family)

    @classmethod
    @together
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

        They are used without a copy, unless `quantization` or `tensor_parallel_size` say otherwise; a CPU's
        projections in 16 bits are copied as it multiplies them fastest. The cache is split as the keys'
        heads are. Raises ValueError for a parameter with NaN or infinity.
        """
        require_own_threads()
        chosen = join(engine_options(options))
        if chosen.hf_overrides or chosen.load_format != "auto":
            raise ValueError("hf_overrides and load_format are not allowed: the parameters are here already")
        keep_compiled(compilation_cache)
        require_finite(on_devices(params))
        llm = cls.__new__(cls)
        llm._begin(config, params, tokenizer, GenerationDefaults(tuple(eos_token_ids)), chosen)
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "LLM":
        """An LLM of the keywords that an `EngineArgs` holds."""
        return cls(**vars(engine_args))

    def _begin(
        self,
        config: ModelConfig,
        params: Decoder,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults,
        options: EngineOptions,
        lacking: str = NONE,
        model: str | None = None,
        family: Family = FAMILIES["llama"],
    ) -> None:
        self.config, self.tokenizer, self.options = config, tokenizer, options
        self._defaults = defaults = ending(defaults, tokenizer)
        self._session, self._closing = disaggregated.started(config, params, options)
        self._session.log = opened(self.engine, options, tokenizer, model)
        self._intake = InputProcessor(
            config.vocab_size,
            self.engine.sizes.max_model_len,
            options,
            tokenizer,
            defaults.eos_token_ids,
            lacking,
            registry_of(options, family, config, params.embed.dtype),
        )

    # ------------------------------------------------------------ whole results

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Tqdm = True,
        *,
        lora_request: Adapters = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continuations of prompts, in their order. A prompt is text, token ids, or a mapping with either of
        them.

        One set of sampling parameters serves all, or a list has one for each; likewise adapters, and
        priorities, of which smaller ones go first. `use_tqdm` may be a callable that makes the bar. Of vLLM's
        other arguments only neutral values are allowed. Raises before anything is run if a prompt or
        parameter is not allowed.
        """
        vllm.check_all(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
        texts = listed(prompts)
        tickets = self._tickets(texts, sampling_params, priority, awaited=False, adapters=lora_request)
        return self._finish(tickets, use_tqdm)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Tqdm = True,
        lora_request: Adapters = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Replies to one conversation or to several; a result's `prompt` is the rendered text.

        `others` are arguments of `generate`. Raises ChatTemplateError if the template refuses a conversation.
        """
        vllm.check_all(chat_template_content_format=chat_template_content_format)
        prompts = self._intake.conversations(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request, **others)

    def chat_prompt(self, messages: list[Message], **options: Any) -> list[int]:
        """A conversation as token ids; options are those of `chat.render_for`."""
        return self._intake.conversation(messages, **options)["prompt_token_ids"]

    log_likelihood, reply = likelihood.log_likelihood, replying.reply
    save_cache, load_cache = snapshots.save_cache, snapshots.load_cache
    update_params, load_params = weights.update_params, weights.load_params
    pause_generation, resume_generation = weights.pause_generation, weights.resume_generation

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Generator[Delta]:
        """Pieces of the continuation as they are generated; the request begins with the first piece that is
        asked for.

        Leaving the loop early aborts it. Raises ValueError or TypeError at once for what is not allowed.
        """
        (ticket,) = self._tickets([prompt], sampling_params, priority, adapters=lora_request)
        return self._session.stream(ticket)

    def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **others: Any
    ) -> AsyncGenerator[Delta]:
        """`stream` for an event loop: steps run in a worker thread. Closing it aborts the request."""
        return in_threads(partial(self.stream, prompt, sampling_params, **others))

    # ------------------------------------------------------------ one step at a time

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue a request for `step`; smaller priorities go first. Raises ValueError for an id in use."""
        tickets = self._tickets([prompt], params, priority, request_id, adapters=lora_request)
        self._session.queue(tickets)
        return tickets[0].id

    def step(self) -> list[RequestOutput]:
        """Advance all requests by one step; returns those of `add_request` that have finished since."""
        return [self._intake.output(ticket) for ticket in self._session.step()]

    def expect(self, requests: int | None) -> None:
        """Say how many requests are to come behind the queued ones, None where no end is in sight: what a
        cold engine compiles for."""
        self.engine.need.to_come = requests

    def has_unfinished_requests(self) -> bool:
        """Whether `step` is still to return requests of `add_request`."""
        return self._session.count_queued > 0

    def abort(self, request_id: str) -> None:
        """End a request now, with finish reason "abort"; unknown ids are ignored."""
        self._session.abort(request_id)

    # ------------------------------------------------------------ the engine

    @property
    def engine(self) -> Engine:
        """The engine that serves all callers. Raises RuntimeError after `close`."""
        return self._session.engine

    @property
    def params(self) -> Decoder:
        """The weights being served, as they lie on the device; a CPU's projections of 16 bits are a copy."""
        return unprepared(self.engine.params)

    def report(self, explained: bool = False) -> dict[str, Any]:
        """What was done so far: latencies in seconds, tokens per second, padding, cache, compilations.

        `explained` adds, as text, a table of the programs that ran: operations, bytes, the floor of their
        time on this device, and measured medians.
        """
        return self.engine.report() | ({"explained": explain(self.engine)} if explained else {})

    @property
    def longest_prompt(self) -> int:
        """Most tokens that a prompt may have."""
        return self._intake.longest

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's generation_config.json recommends, else the usual defaults."""
        return SamplingParams.from_dict(self.options.recommended(self._defaults.sampling))

    def close(self) -> None:
        """Abort what runs and free the device's memory; a forked process leaves its parent's engine alone."""
        if is_inherited():
            return
        self._closing.close()
        for part in filter(None, (self._intake.grammars, self._session, self._session.log)):
            part.close()
        give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ as in vLLM

    beam_search = vllm.beam_search
    enqueue, enqueue_chat = vllm.enqueue, vllm.enqueue_chat
    wait_for_completion = vllm.wait_for_completion
    reset_prefix_cache = vllm.reset_prefix_cache
    sleep, wake_up, is_sleeping = vllm.sleep, vllm.wake_up, vllm.is_sleeping
    get_metrics, get_world_size = vllm.get_metrics, vllm.get_world_size
    start_profile, stop_profile = vllm.start_profile, vllm.stop_profile
    embed, encode = embedding.embed, vllm.encode
    reward, classify, score = vllm.reward, vllm.classify, vllm.score
    collective_rpc, apply_model = vllm.collective_rpc, vllm.apply_model

    def _tickets(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        request_id: str | None = None,
        awaited: bool = True,
        adapters: Adapters = None,
    ) -> list[RequestGroup]:
        """Tickets of checked and tokenized prompts, their ids reserved; nothing is queued yet."""
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = one_each("sampling_params", given, len(prompts))
        ranks = one_each("priorities", 0 if priority is None else priority, len(prompts))
        make = partial(partial, self._intake.ticket, awaited=awaited)
        own = one_each("lora_requests", adapters, len(prompts))
        each = zip(prompts, params, ranks, own, strict=True)
        makes = [make(prompt=p, params=s, priority=r, lora_request=a) for p, s, r, a in each]
        return self._session.tickets_of(makes, request_id)

    def _finish(self, tickets: list[RequestGroup], use_tqdm: Tqdm) -> list[RequestOutput]:
        try:
            with progress(len(tickets), use_tqdm) as done:
                self._session.finish(tickets, done)
        finally:  # also where no bar can be made
            self._session.drop(tickets)
        return [self._intake.output(ticket) for ticket in tickets]
