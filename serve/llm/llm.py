"""The Python API: `LLM` loads a model and generates. Names and results are as in vLLM's offline class."""

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from jax.sharding import Mesh

from ...kvcache.stages import tree_devices
from ...lora.request import LoRARequest, LoRARequests
from ...model.config import ModelConfig
from ...model.pooling import PoolingParams
from ...model.transformer import Decoder
from ...model.weights.device_forms import restore_params
from ...sampling.params import BeamSearchParams, SamplingParams
from ..engine.core.engine import Engine
from ..engine.metrics import profiling
from ..engine.startup.model_source import with_end_tokens
from ..engine.weights.sleep import TAGS
from ..host.process import is_forked, trim_heap
from ..planner.roofline.explain import explain_programs
from ..runtime.multihost.rendezvous import fail_group_on_error
from ..text.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
from ..text.tokenizer.chats.chat import ChatMessage, effort_variables
from ..text.tokenizer.tokenizer import Tokenizer
from . import disaggregated, loading, snapshots, vllm, weights
from .audit.log import open_audit_log
from .driver import Driver
from .input_processor import Conversations, PromptInput, PromptInputs, SamplingParamsInput, list_prompts
from .metrics import Metric, engine_metrics
from .progress_bar import Tqdm, show_progress
from .session import PauseMode
from .subscription import Subscription
from .tasks import beam, chat_reply, embedding, likelihood, training
from .tasks.beam import BeamSearchOutput
from .tasks.likelihood import LogLikelihood, ScoringChoice
from .vllm import check_vllm_arguments, make_compat_property, make_refused_method


class LLM:
    """A model ready to generate.

    model: a Hugging Face folder, a folder written by `duetto convert`, or an id on the hub; None is the small
        model that ships with duetto.
    dtype: "auto", "float32" ("float"), "bfloat16", "float16" ("half"), or such a dtype of numpy, jax, torch.
    tokenizer: another folder or id to take the tokenizer from.
    revision, tokenizer_revision, download_dir, hf_token: for ids, see `checkpoints.hub.resolve_model`.
    mesh: mesh of devices, instead of the mesh that `tensor_parallel_size` makes.
    compilation_cache: folder of compiled programs; "auto" is in the user's cache folder, None is jax's
        setting.
    options: fields of EngineOptions.

    With `nnodes` processes only rank 0 returns from the constructor. The other ranks serve it, and end with
    it by SystemExit. Raises ValueError (CheckpointError for a folder that cannot be loaded) or TypeError for
    an unknown option. All methods may be called from any thread, but raise RuntimeError in a forked process.

    `session` holds the requests of all callers, `input_processor` checks and tokenizes prompts, `folder` is
    the model's folder, and `served_dtype` the dtype of the computation.
    """

    @fail_group_on_error
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
        revisions = {"revision": revision, "tokenizer_revision": tokenizer_revision}
        hub = {"download_dir": download_dir, "token": hf_token}
        args = model, tokenizer, dtype, mesh, compilation_cache, options, revisions, hub
        self._start_session(loading.load_llm_model(*args))

    @classmethod
    @fail_group_on_error
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
        """Make an LLM of parameters that are on a device, or sharded over several by NamedShardings.

        Arrays that are served as they are must not be donated by a train step. Copies are made for
        `quantization` and `tensor_parallel_size`, of a CPU's 16-bit projections, and with `cpu_kernels=True`
        of all projections. Raises ValueError for a parameter with NaN or infinity.
        """
        llm = cls.__new__(cls)
        args = config, params, tokenizer, eos_token_ids, compilation_cache, options
        llm._start_session(loading.model_from_params(*args))
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "LLM":
        """Make an LLM of the keywords in an `EngineArgs`."""
        return cls(**vars(engine_args))

    def _start_session(self, model: loading.LoadedModel) -> None:
        self.config, self.tokenizer, self.options = model.config, model.tokenizer, model.options
        self.defaults = with_end_tokens(model.defaults, model.tokenizer)
        self.folder, self._find_source = model.folder, model.find_source
        self.session, self._closing = disaggregated.start_session(model.config, model.params, model.options)
        self.served_dtype = np.dtype(self.engine.params.embed.dtype)
        self.session.audit_log = open_audit_log(self.engine, model.options, model.tokenizer, model.folder)
        self.input_processor = model.make_processor(self.engine.sizes, self.defaults)

    def generate(
        self,
        prompts: PromptInputs,
        sampling_params: SamplingParamsInput = None,
        use_tqdm: Tqdm = True,
        *,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate continuations of prompts, in their order. A prompt is text, token ids, or a mapping with
        `prompt` or `prompt_token_ids`.

        Sampling parameters, adapters and priorities (smaller ones go first) are one for all prompts, or a
        list with one for each. `use_tqdm` may be a callable that makes the bar. vLLM's other arguments may
        only have neutral values. Raises before any step if a prompt or parameter is not allowed.
        """
        check_vllm_arguments(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
        params = self._with_default_params(sampling_params)
        subscriptions = self.input_processor.make_subscriptions(
            list_prompts(prompts), params, priority, lora_request, is_awaited=False
        )
        self.session.submit_and_run(subscriptions, use_tqdm)
        return [subscription.make_output() for subscription in subscriptions]

    def chat(
        self,
        messages: Conversations,
        sampling_params: SamplingParamsInput = None,
        use_tqdm: Tqdm = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Generate replies to one conversation or several; the `prompt` of a result is the rendered text.
        A grammar begins after the reasoning, whose marks stay in the text; `reply` returns both apart.
        `others` are arguments of `generate`. Raises ChatTemplateError if the template refuses a conversation.
        """
        prompts, params = self.input_processor.render_conversations(
            messages, self._with_default_params(sampling_params), chat_template_content_format,
            chat_template_kwargs, reasoning_effort, add_generation_prompt=add_generation_prompt,
            chat_template=chat_template, continue_final_message=continue_final_message, tools=tools,
        )  # fmt: skip
        return self.generate(prompts, params, use_tqdm, lora_request=lora_request, **others)

    def chat_prompt(self, messages: list[ChatMessage], **options: Any) -> list[int]:
        """Return the token ids of a conversation. `options` are arguments of `chat.render_with_tokenizer`."""
        return self.input_processor.render_conversation(messages, **options)["prompt_token_ids"]

    def reply(
        self,
        messages: list[ChatMessage],
        sampling_params: SamplingParams | None = None,
        use_tqdm: Tqdm = False,
        *,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        tool_call_parser: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
    ) -> list[dict[str, Any]]:
        """Generate the `n` choices of a reply to a conversation, as in OpenAI's API, tool calls included; see
        `tasks.chat_reply`. Raises ValueError for what is not allowed, ChatTemplateError as `chat` does."""
        choice = {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}
        params = self._with_default_params(sampling_params)
        variables = effort_variables(reasoning_effort) | dict(chat_template_kwargs or {})
        task = chat_reply.make_chat_task(messages, params, {"tools": tools, **choice}, variables)
        return chat_reply.generate_reply(self.session, self.input_processor, task, tool_call_parser, use_tqdm)

    def beam_search(
        self,
        prompts: PromptInputs,
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        use_tqdm: Tqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the `beam_width` continuations of each prompt with the highest log-probability, best first,
        searching `concurrency_limit` prompts at once, or all. Raises ValueError for a prompt that `generate`
        refuses, and for a `beam_width` beyond the option `max_logprobs`."""
        args = self.session, self.input_processor, prompts, params, use_tqdm, concurrency_limit, lora_request
        return beam.search_beams(*args)

    def log_likelihood(
        self,
        prompts: PromptInputs,
        continuations: str | Sequence[int] | Sequence[str | Sequence[int]] | None = None,
        by: ScoringChoice = "prefill",
    ) -> list[LogLikelihood]:
        """Return log-probabilities of each continuation's tokens, or of each prompt's tokens after its first
        (teacher forcing), by prefill or decode steps or whichever is exact; see `tasks.likelihood`."""
        return likelihood.log_likelihood(self.session, self.input_processor, prompts, continuations, by)

    def embed(
        self,
        prompts: PromptInputs,
        *,
        use_tqdm: Tqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return embeddings of prompts, in their order; see `tasks.embedding`."""
        check_vllm_arguments(tokenization_kwargs=tokenization_kwargs)
        args = self.session, self.input_processor, prompts, pooling_params, lora_request, use_tqdm
        return embedding.embed_prompts(*args)

    def stream(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Generator[CompletionOutput]:
        """Generate a continuation piece by piece; the request begins with the first piece that is requested.

        Closing the generator aborts it. Raises ValueError or TypeError at once for what is not allowed.
        """
        return self.session.stream(self._subscribe(prompt, sampling_params, priority, lora_request))

    def astream(
        self, prompt: PromptInput, sampling_params: SamplingParams | None = None, **others: Any
    ) -> AsyncGenerator[CompletionOutput]:
        """`stream` for an event loop: a thread takes the steps. Closing the generator aborts the request."""
        return self.async_driver.stream(partial(self._subscribe, prompt, sampling_params, **others))

    @cached_property
    def async_driver(self) -> Driver:
        """The driver of the requests of all event loops."""
        return Driver(self.session)

    def add_request(
        self,
        prompt: PromptInput,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue a request for `step`; smaller priorities go first. Raises ValueError for an id in use."""
        subscription = self._subscribe(prompt, params, priority, lora_request, request_id)
        self.session.enqueue([subscription])
        return subscription.id

    def step(self) -> list[RequestOutput]:
        """Run one step; return the requests of `add_request` that have ended since the last call."""
        return [ended.make_output() for ended in self.session.step()]

    def expect(self, requests: int | None) -> None:
        """Set the number of requests to follow (None: unknown). A cold engine compiles shapes for them."""
        self.engine.compile_planner.expected_requests = requests

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` will still return requests of `add_request`."""
        return self.session.num_queued > 0

    def abort(self, request_id: str) -> None:
        """End a request now, with finish reason "abort"; unknown ids are ignored."""
        self.session.abort(request_id)

    def enqueue(
        self,
        prompts: PromptInputs,
        sampling_params: SamplingParamsInput = None,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: Tqdm = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts as `generate` takes them, for `wait_for_completion`; return their ids."""
        check_vllm_arguments(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
        params = self._with_default_params(sampling_params)
        subscriptions = self.input_processor.make_subscriptions(
            list_prompts(prompts), params, priority, lora_request, is_awaited=False
        )
        self.session.enqueue(subscriptions)
        return [subscription.id for subscription in subscriptions]

    def enqueue_chat(
        self,
        messages: Conversations,
        sampling_params: SamplingParamsInput = None,
        use_tqdm: Tqdm = True,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        **others: Any,
    ) -> list[str]:
        """Queue conversations as `chat` takes them; return their ids. `others` are arguments of `enqueue`."""
        prompts, params = self.input_processor.render_conversations(
            messages, self._with_default_params(sampling_params), chat_template_content_format,
            chat_template_kwargs, reasoning_effort, add_generation_prompt=add_generation_prompt,
            chat_template=chat_template, continue_final_message=continue_final_message, tools=tools,
        )  # fmt: skip
        return self.enqueue(prompts, params, lora_request, priority, use_tqdm, **others)

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: Tqdm = True) -> list[RequestOutput]:
        """Run all queued requests to their end; return the results in the order of their queueing."""
        check_vllm_arguments(output_type=None if output_type is RequestOutput else output_type)
        with show_progress(self.session.num_queued, use_tqdm) as on_ended:
            return [ended.make_output() for ended in self.session.wait_queued(on_ended)]

    @property
    def params(self) -> Decoder:
        """The served weights, on the device. Weights that are multiplied in another form are copied."""
        return restore_params(self.engine.params)

    def logprobs_fn(self) -> Callable[..., Any]:
        """Return `f(params, tokens, ...)`, with this engine's bits; see `training.make_logprobs_fn`."""
        return training.make_logprobs_fn(self.session, self.input_processor)

    def update_params(self, params: Decoder, mode: PauseMode | None = None, copy: bool = False) -> None:
        """Serve other weights of the same shapes, without compiling a step; see `weights.update_params`."""
        weights.update_params(self.session, self.options, params, mode, copy)

    def load_params(self, path: str | Path | None = None, mode: PauseMode | None = None) -> int:
        """Serve the weights of a folder of the same model; None is the model's own folder. Returns the number
        of updates so far. Raises CheckpointError for the folder, and as `update_params` does."""
        model_source = weights.resolve_model_source(path, self._find_source)
        return weights.load_params(self.session, self.options, self.config, model_source, mode)

    def save_params(self, path: str | Path) -> None:
        """Write the served weights as an Orbax folder, sharded as here; see `weights.save_params`."""
        weights.save_params(self.config, self.params, self.folder, path)

    def save_cache(self, path: str | Path) -> int:
        """Write the cached pages into a folder, and return their number; see `snapshots.save_cache`."""
        return snapshots.save_cache(self.session, self.options, path)

    def load_cache(self, path: str | Path) -> None:
        """Use the pages of `save_cache` until other weights are served; see `snapshots.load_cache`."""
        snapshots.load_cache(self.session, self.options, path)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Discard all cached pages. While requests run, do nothing and return False.

        `reset_running_requests` puts running requests back into the queue, to be computed again.
        `reset_connector` also discards pages in host memory (`swap_space`) and a loaded cache; files stay.
        """
        return snapshots.reset_prefix_cache(self.session, reset_running_requests, reset_connector)

    def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Take no steps until `resume_generation`. Calls that need a step raise RuntimeError, others wait.
        See `sleep` for `mode`. `clear_cache` discards the cache: kept requests are computed again."""
        self.session.abort_or_drain(mode)
        with self.session.hold_engine():
            if clear_cache and not self.engine.is_sleeping:
                self.engine.preempt_and_reset_cache()
            self.engine.sleep(0)

    def resume_generation(self) -> None:
        """End a pause."""
        self.wake_up(TAGS[-1:])

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Take no steps until `wake_up`. Calls that need one raise RuntimeError; queued requests wait.

        Level 0 only pauses. Level 1 moves the parameters to the host and drops the cache. Level 2 drops the
        parameters too, and `update_params` has to bring others. Nothing is compiled afterwards. `mode` of
        unfinished requests: "abort", "wait" (run them to their end before), or "keep" (continue after the
        sleep). Raises ValueError for another level or mode.
        """
        if level not in (0, 1, 2):
            raise ValueError(f"level={level!r} is not allowed: 0, 1 or 2")
        self.session.abort_or_drain(mode)
        with self.session.hold_engine():
            self.engine.sleep(level)
        trim_heap()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore what `sleep` released: everything, or `tags` of "weights", "kv_cache" and "scheduling".
        Steps are taken again once weights and cache are back. Raises ValueError for another tag."""
        with self.session.hold_engine():
            self.engine.wake_up(TAGS if tags is None else tags)
        self.session.wake()

    def is_sleeping(self) -> bool:
        return self.engine.is_sleeping

    @property
    def engine(self) -> Engine:
        """The engine that serves all callers. Raises RuntimeError after `close`."""
        return self.session.engine

    def report(self, explained: bool = False) -> dict[str, Any]:
        """Return statistics since the start; times are in seconds.

        `explained` adds a table, as text, of the programs that ran: operations, bytes, the lower bound of
        their time on this device, and measured medians.
        """
        return self.engine.report() | ({"explained": explain_programs(self.engine)} if explained else {})

    def get_metrics(self) -> list[Metric]:
        """Return counts since the engine's start under vLLM's names."""
        with self.session.hold_engine():
            return engine_metrics(self.engine)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of devices that the model is spread over."""
        return len(tree_devices(self.engine.params))

    def start_profile(self, profile_prefix: str | None = None) -> Path:
        """Record a profile (jax.profiler) until `stop_profile`; return its folder, see `start_profiling`."""
        return profiling.start_profiling(self.options.profiler_config, profile_prefix)

    def stop_profile(self) -> None:
        """Write the profile. Raises RuntimeError if none is recorded."""
        with self.session.hold_engine():
            profiling.stop_profiling()

    @property
    def longest_prompt(self) -> int:
        """Maximum number of tokens of a prompt."""
        return self.input_processor.longest_prompt

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model's generation_config.json recommends, else the defaults."""
        return SamplingParams.from_dict(self.options.default_sampling(self.defaults.sampling))

    def close(self) -> None:
        """Abort all requests and free the device's memory; a forked process leaves its parent's engine."""
        if is_forked():
            return
        self._closing.close()
        for part in filter(None, (self.input_processor.grammars, self.session, self.session.audit_log)):
            part.close()
        trim_heap()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    encode = make_refused_method("encode", vllm.EMBED_HINT)
    reward = make_refused_method("reward", f"models are served without heads that reward; {vllm.EMBED_HINT}")
    classify = make_refused_method(
        "classify", f"models are served to generate, and have no classes; {vllm.LIKELIHOOD_HINT}"
    )
    score = make_refused_method(
        "score", f"in vLLM it is the similarity of two texts by a pooling model; {vllm.LIKELIHOOD_HINT}"
    )
    llm_engine, renderer = map(make_compat_property, ("llm_engine:LLMEngine", "renderers:Renderer"))
    collective_rpc = vllm.collective_rpc
    apply_model = make_refused_method("apply_model", f"there is no torch module; {vllm.WEIGHTS_HINT}")

    def _with_default_params(self, params: SamplingParamsInput) -> Any:
        return self.get_default_sampling_params() if params is None else params

    def _subscribe(
        self,
        prompt: PromptInput,
        params: SamplingParams | None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        request_id: str | None = None,
    ) -> Subscription:
        """Make the subscription to one prompt, for a client that waits for its first token."""
        make = self.input_processor.make_subscription
        subscription = make(prompt, self._with_default_params(params), priority, lora_request=lora_request)
        self.session.assign_ids([subscription], request_id)
        return subscription
