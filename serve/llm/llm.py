"""The Python API: `LLM` loads a model and generates; names and results are those of vLLM's offline class."""

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from jax.sharding import Mesh

from ...kvcache.stages import devices
from ...lora.request import Adapters, LoRARequest
from ...model.config import ModelConfig
from ...model.pooling import PoolingParams
from ...model.transformer import Decoder
from ...model.weights.prepared import unprepared
from ...sampling.params import BeamSearchParams, SamplingParams
from ..engine.core.engine import Engine
from ..engine.startup.origin import ending
from ..engine.weights.sleep import TAGS
from ..host.process import give_back, is_inherited
from ..planner.roofline.explain import explain
from ..runtime.multihost.rendezvous import together
from ..text.outputs import Delta, EmbeddingRequestOutput, RequestOutput
from ..text.tokenizer.chat import Message, effort_variables
from ..text.tokenizer.tokenizer import Tokenizer
from . import disaggregated, loading, profiling, snapshots, weights
from .audit.log import opened
from .bar import Tqdm, progress
from .driver import Driver
from .input_processor import Prompt, listed
from .metrics import Metric, snapshot
from .request_group import RequestGroup, StreamCursor
from .session import Mode
from .tasks import beam, embedding, likelihood, replying
from .tasks.beam import BeamSearchOutput
from .tasks.likelihood import By, LogLikelihood
from .vllm import EMBEDS, LIKELIHOOD, WEIGHTS, check_all, collective_rpc, of_compat, refused

Params = SamplingParams | Sequence[SamplingParams] | None
Prompts = Prompt | Sequence[Prompt]
Messages = list[Message] | list[list[Message]]


class LLM:
    """A model ready to generate.

    model: a Hugging Face folder, one written by `duetto convert`, or an id on the hub; None is the small
        model that ships with duetto.
    dtype: "auto", "float32" ("float"), "bfloat16", "float16" ("half"), or such a dtype of numpy, jax, torch.
    tokenizer: another folder or id to take the tokenizer from.
    revision, tokenizer_revision, download_dir, hf_token: for ids, see `checkpoints.hub.resolve`.
    mesh: replaces the one that `tensor_parallel_size` makes.
    compilation_cache: a folder for compiled programs; "auto" is one in the user's cache folder, None leaves
        jax's own setting.
    options: fields of EngineOptions.

    With `nnodes` processes only rank 0 returns from the constructor; the others serve it, and end with it by
    SystemExit. Raises ValueError (CheckpointError for a folder that cannot be loaded) or TypeError for an
    unknown option. All methods may be called from any thread, but raise RuntimeError in a forked process.

    `session` holds the requests of all callers, `input_processor` checks and tokenizes prompts, `folder` is
    the model's.
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
        revisions = {"revision": revision, "tokenizer_revision": tokenizer_revision}
        hub = {"download_dir": download_dir, "token": hf_token}
        args = model, tokenizer, dtype, mesh, compilation_cache, options, revisions, hub
        self._begin(loading.read(*args))

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
        """Make an LLM of parameters that are on a device, or sharded over several by NamedShardings.

        They are not copied, unless `quantization` or `tensor_parallel_size` require it; a CPU's 16-bit
        projections are copied into its layout, and all weights with `cpu_kernels=True`. The cache is sharded
        as the heads of the keys are. Raises ValueError for a parameter with NaN or infinity.
        """
        llm = cls.__new__(cls)
        llm._begin(loading.given(config, params, tokenizer, eos_token_ids, compilation_cache, options))
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "LLM":
        """Make an LLM of the keywords in an `EngineArgs`."""
        return cls(**vars(engine_args))

    def _begin(self, model: loading.LoadedModel) -> None:
        self.config, self.tokenizer, self.options = model.config, model.tokenizer, model.options
        self.defaults = ending(model.defaults, model.tokenizer)
        self.folder, self._again = model.folder, model.again
        self.session, self._closing = disaggregated.started(model.config, model.params, model.options)
        self.session.log = opened(self.engine, model.options, model.tokenizer, model.folder)
        self.input_processor = model.processor(self.engine.sizes, self.defaults)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: Tqdm = True,
        *,
        lora_request: Adapters = None,
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
        check_all(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
        params = self._settled(sampling_params)
        makes = self.input_processor.makes(listed(prompts), params, priority, lora_request, awaited=False)
        return self._outputs(self.session.complete(makes, use_tqdm))

    def chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        use_tqdm: Tqdm = True,
        lora_request: Adapters = None,
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
        prompts, params = self.input_processor.conversations(
            messages, self._settled(sampling_params), chat_template_content_format, chat_template_kwargs,
            reasoning_effort, add_generation_prompt=add_generation_prompt, chat_template=chat_template,
            continue_final_message=continue_final_message, tools=tools,
        )  # fmt: skip
        return self.generate(prompts, params, use_tqdm, lora_request=lora_request, **others)

    def chat_prompt(self, messages: list[Message], **options: Any) -> list[int]:
        """Return the token ids of a conversation; options are those of `chat.render_for`."""
        return self.input_processor.conversation(messages, **options)["prompt_token_ids"]

    def reply(
        self,
        messages: list[Message],
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
        `tasks.replying`. Raises ValueError for what is not allowed, and ChatTemplateError as `chat` does."""
        choice = {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}
        params = self._settled(sampling_params)
        variables = effort_variables(reasoning_effort) | dict(chat_template_kwargs or {})
        task = replying.task_of(messages, params, {"tools": tools, **choice}, variables)
        return replying.reply(self.session, self.input_processor, task, tool_call_parser, use_tqdm)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: Adapters = None,
        use_tqdm: Tqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the `beam_width` continuations of each prompt with the highest log-probability, best first,
        searching `concurrency_limit` prompts at once, or all. Raises ValueError for a prompt that `generate`
        refuses, and for a `beam_width` beyond the option `max_logprobs`."""
        args = self.session, self.input_processor, prompts, params, use_tqdm, concurrency_limit, lora_request
        return beam.search(*args)

    def log_likelihood(
        self,
        prompts: Prompts,
        continuations: str | Sequence[int] | Sequence[str | Sequence[int]] | None = None,
        by: By = "prefill",
    ) -> list[LogLikelihood]:
        """Return log-probabilities of each prompt's tokens after its first, or of its continuation's (teacher
        forcing), computed by prefill or by decode steps; see `tasks.likelihood`."""
        return likelihood.log_likelihood(self.session, self.input_processor, prompts, continuations, by)

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: Tqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Adapters = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return embeddings of prompts, in their order; see `tasks.embedding`."""
        check_all(tokenization_kwargs=tokenization_kwargs)
        args = self.session, self.input_processor, prompts, pooling_params, lora_request, use_tqdm
        return embedding.embed(*args)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Generator[Delta]:
        """Generate a continuation piece by piece; the request begins with the first piece that is requested.

        Closing the generator aborts it. Raises ValueError or TypeError at once for what is not allowed.
        """
        return self.session.stream(self._group(prompt, sampling_params, priority, lora_request))

    def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **others: Any
    ) -> AsyncGenerator[Delta]:
        """`stream` for an event loop: a thread takes the steps. Closing the generator aborts the request."""
        make = partial(self._group, prompt, sampling_params, **others)
        return self.async_driver.stream(make, lambda group: StreamCursor(group).take)

    @cached_property
    def async_driver(self) -> Driver:
        """The driver of the requests of all event loops."""
        return Driver(self.session)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue a request for `step`; smaller priorities go first. Raises ValueError for an id in use."""
        group = self._group(prompt, params, priority, lora_request, request_id)
        self.session.queue([group])
        return group.id

    def step(self) -> list[RequestOutput]:
        """Advance all requests by one step; return those of `add_request` that have ended since the last
        call."""
        return self._outputs(self.session.step())

    def expect(self, requests: int | None) -> None:
        """Set the number of requests to come after the queued ones, None if unknown: a cold engine compiles
        shapes accordingly."""
        self.engine.need.to_come = requests

    def has_unfinished_requests(self) -> bool:
        """True if `step` is still to return requests of `add_request`."""
        return self.session.count_queued > 0

    def abort(self, request_id: str) -> None:
        """End a request now, with finish reason "abort"; unknown ids are ignored."""
        self.session.abort(request_id)

    def enqueue(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        lora_request: Adapters = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: Tqdm = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts as `generate` takes them, for `wait_for_completion`; return their ids."""
        check_all(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
        params = self._settled(sampling_params)
        makes = self.input_processor.makes(listed(prompts), params, priority, lora_request, awaited=False)
        groups = self.session.groups_of(makes)
        self.session.queue(groups)
        return [group.id for group in groups]

    def enqueue_chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        use_tqdm: Tqdm = True,
        lora_request: Adapters = None,
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
        """Queue conversations as `chat` takes them, for `wait_for_completion`; return their ids. `others` are
        arguments of `enqueue`."""
        prompts, params = self.input_processor.conversations(
            messages, self._settled(sampling_params), chat_template_content_format, chat_template_kwargs,
            reasoning_effort, add_generation_prompt=add_generation_prompt, chat_template=chat_template,
            continue_final_message=continue_final_message, tools=tools,
        )  # fmt: skip
        return self.enqueue(prompts, params, lora_request, priority, use_tqdm, **others)

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: Tqdm = True) -> list[RequestOutput]:
        """Run all queued requests to their end; return the results in the order of their queueing."""
        check_all(output_type=None if output_type is RequestOutput else output_type)
        with progress(self.session.count_queued, use_tqdm) as on_ended:
            return self._outputs(self.session.wait(on_ended))

    @property
    def params(self) -> Decoder:
        """The weights being served, on the device; those that it multiplies in another form are a copy."""
        return unprepared(self.engine.params)

    def update_params(self, params: Decoder, mode: Mode | None = None) -> None:
        """Serve other weights of the same shapes from now on, without a compilation. `mode` and errors are
        those of `weights.update_params`."""
        weights.update_params(self.session, self.options, params, mode)

    def load_params(self, path: str | Path | None = None, mode: Mode | None = None) -> int:
        """`update_params` with a folder of the same model, None its own, in the served dtype; return the
        number of updates so far. Raises CheckpointError for the folder."""
        origin = weights.origin_of(path, self._again)
        return weights.load_params(self.session, self.options, self.config, origin, mode)

    def save_params(self, path: str | Path) -> None:
        """Write the served weights, as they are stored and sharded here, as an Orbax folder that `LLM` loads.
        Errors are those of `weights.save_params`."""
        weights.save_params(self.config, self.params, self.folder, path)

    def save_cache(self, path: str | Path) -> int:
        """Write the cached pages of prompts and answers into a folder for `load_cache`; return their number.
        Errors are those of `snapshots.save_cache`."""
        return snapshots.save_cache(self.session, self.options, path)

    def load_cache(self, path: str | Path) -> None:
        """Find pages of `save_cache` in a folder, until other weights are served; each is read when a prompt
        needs it. Errors are those of `snapshots.load_cache`."""
        snapshots.load_cache(self.session, self.options, path)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached pages; do nothing and return False while requests run.

        `reset_running_requests` puts those back into the queue, to be computed again from their tokens.
        `reset_connector` forgets pages in host memory (`swap_space`) and a loaded cache too; files stay.
        """
        return snapshots.reset(self.session, reset_running_requests, reset_connector)

    def pause_generation(self, mode: Mode = "abort", clear_cache: bool = True) -> None:
        """Take no steps until `resume_generation`; calls that need one raise RuntimeError, others wait.
        `mode` is that of `sleep`. `clear_cache` forgets the cache: kept requests are computed again."""
        self.session.settle(mode)
        with self.session.turn():
            if clear_cache and not self.engine.is_sleeping:
                self.engine.vacate()
            self.engine.sleep(0)

    def resume_generation(self) -> None:
        """End a pause."""
        self.wake_up(TAGS[-1:])

    def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        """Take no steps until `wake_up`: calls that need one raise RuntimeError, queued requests and those of
        `astream` wait.

        Level 0 only pauses. Level 1 moves the parameters to the host and drops the cache; level 2 drops the
        parameters too, and `update_params` has to bring others. Nothing is compiled afterwards. `mode` of
        unfinished requests: "abort", "wait" (run them to their end before), or "keep" (continue after the
        sleep). Raises ValueError for another level or mode.
        """
        if level not in (0, 1, 2):
            raise ValueError(f"level={level!r} is not allowed: 0, 1 or 2")
        self.session.settle(mode)
        with self.session.turn():
            self.engine.sleep(level)
        give_back()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore what `sleep` released: all, or the named of "weights", "kv_cache" and "scheduling". Steps
        are taken again once weights and cache are back. Raises ValueError for another tag."""
        with self.session.turn():
            self.engine.wake_up(TAGS if tags is None else tags)
        self.session.wake()

    def is_sleeping(self) -> bool:
        return self.engine.is_sleeping

    @property
    def engine(self) -> Engine:
        """The engine that serves all callers. Raises RuntimeError after `close`."""
        return self.session.engine

    def report(self, explained: bool = False) -> dict[str, Any]:
        """Return statistics since the start: latencies in seconds, tokens per second, padding, cache,
        compilations.

        `explained` adds a table, as text, of the programs that ran: operations, bytes, the lower bound of
        their time on this device, and measured medians.
        """
        return self.engine.report() | ({"explained": explain(self.engine)} if explained else {})

    def get_metrics(self) -> list[Metric]:
        """Return counts since the engine's start under vLLM's names."""
        with self.session.turn():
            return snapshot(self.engine)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of devices that the model is spread over."""
        return len(devices(self.engine.params))

    def start_profile(self, profile_prefix: str | None = None) -> Path:
        """Record a profile of host and device (jax.profiler) until `stop_profile`; return its folder, see
        `profiling.start`. Raises RuntimeError while another profile is recorded."""
        return profiling.start(self.options.profiler_config, profile_prefix)

    def stop_profile(self) -> None:
        """Write the profile. Raises RuntimeError if none is recorded."""
        with self.session.turn():
            profiling.stop()

    @property
    def longest_prompt(self) -> int:
        """Maximum number of tokens of a prompt."""
        return self.input_processor.longest

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model's generation_config.json recommends, else the defaults."""
        return SamplingParams.from_dict(self.options.recommended(self.defaults.sampling))

    def close(self) -> None:
        """Abort all requests and free the device's memory; a forked process leaves its parent's engine."""
        if is_inherited():
            return
        self._closing.close()
        for part in filter(None, (self.input_processor.grammars, self.session, self.session.log)):
            part.close()
        give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    encode = refused("encode", EMBEDS)
    reward = refused("reward", f"models are served without heads that reward; {EMBEDS}")
    classify = refused("classify", f"models are served to generate, and have no classes; {LIKELIHOOD}")
    score = refused("score", f"in vLLM it is the similarity of two texts by a pooling model; {LIKELIHOOD}")
    llm_engine, renderer = of_compat("llm_engine:LLMEngine"), of_compat("renderers:Renderer")
    collective_rpc = collective_rpc
    apply_model = refused("apply_model", f"there is no torch module; {WEIGHTS}")

    def _settled(self, params: Params) -> Any:
        return self.get_default_sampling_params() if params is None else params

    def _group(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        request_id: str | None = None,
    ) -> RequestGroup:
        """Make a group whose first token a client waits for."""
        makes = self.input_processor.makes([prompt], self._settled(params), priority, lora_request)
        return self.session.groups_of(makes, request_id)[0]

    def _outputs(self, groups: Sequence[RequestGroup]) -> list[RequestOutput]:
        return [self.input_processor.output(group) for group in groups]
