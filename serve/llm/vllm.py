"""What `LLM` has for vLLM's names only: thin functions that are its methods, and neutral arguments."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import jax

from ...kvcache.stages import devices
from ...lora.request import Adapters
from ...neutral import check_neutral
from ...sampling.params import BeamSearchParams, SamplingParams
from ..engine.weights.sleep import TAGS
from ..host.memory import give_back
from ..text.outputs import RequestOutput
from ..text.tokenizer.chat import Message
from .bar import Tqdm, progress
from .intake import Prompt, listed
from .metrics import Metric, snapshot
from .tasks import beam
from .tasks.beam import BeamSearchOutput

if TYPE_CHECKING:
    from .llm import LLM

PROFILES = "duetto-profile"  # the folder of traces, in the working directory


def check_all(**given: Any) -> None:
    """Raise ValueError for an argument of vLLM's, or one of a list of them, that asks for what is not
    here."""
    for name, value in given.items():
        for one in value if isinstance(value, (list, tuple)) and value else [value]:
            check_neutral("call", name, one)


# ---------------------------------------------------------------- requests


def beam_search(
    llm: "LLM",
    prompts: Prompt | Sequence[Prompt],
    params: BeamSearchParams,
    lora_request: Adapters = None,
    use_tqdm: Tqdm = False,
    concurrency_limit: int | None = None,
) -> list[BeamSearchOutput]:
    """The `beam_width` continuations of each prompt that have the highest log-probability, best first.

    `concurrency_limit` is the number of prompts searched at once; None is all. Raises ValueError for a prompt
    that `generate` refuses, and for a `beam_width` that needs more log-probabilities than the engine reports.
    """
    return beam.search(llm, prompts, params, use_tqdm, concurrency_limit, lora_request)


def enqueue(
    llm: "LLM",
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    lora_request: Adapters = None,
    priority: int | Sequence[int] | None = None,
    use_tqdm: Tqdm = True,
    tokenization_kwargs: dict[str, Any] | None = None,
    mm_processor_kwargs: dict[str, Any] | None = None,
) -> list[str]:
    """Queue prompts as `generate` takes them, for `wait_for_completion`; returns their ids."""
    check_all(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
    texts = listed(prompts)
    tickets = llm._tickets(texts, sampling_params, priority, awaited=False, adapters=lora_request)
    llm._session.queue(tickets)
    return [ticket.id for ticket in tickets]


def enqueue_chat(
    llm: "LLM",
    messages: list[Message] | list[list[Message]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    use_tqdm: Tqdm = True,
    lora_request: Adapters = None,
    priority: int | Sequence[int] | None = None,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    tokenization_kwargs: dict[str, Any] | None = None,
    mm_processor_kwargs: dict[str, Any] | None = None,
) -> list[str]:
    """Queue conversations as `chat` takes them, for `wait_for_completion`; returns their ids."""
    check_all(chat_template_content_format=chat_template_content_format)
    prompts = llm._intake.conversations(
        messages,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        **(chat_template_kwargs or {}),
    )
    return enqueue(
        llm,
        prompts,
        sampling_params,
        lora_request,
        priority,
        use_tqdm,
        tokenization_kwargs,
        mm_processor_kwargs,
    )


def wait_for_completion(llm: "LLM", output_type: Any = None, *, use_tqdm: Tqdm = True) -> list[RequestOutput]:
    """Run all that is queued to its end; returns the results in the order of their queueing."""
    check_all(output_type=None if output_type is RequestOutput else output_type)
    with progress(llm._session.count_queued, use_tqdm) as done:
        return [llm._intake.output(ticket) for ticket in llm._session.wait(done)]


# ---------------------------------------------------------------- the engine's memory


def reset_prefix_cache(
    llm: "LLM", reset_running_requests: bool = False, reset_connector: bool = False
) -> bool:
    """Forget the pages of prompts that have been computed. False, and nothing is done, while requests run.

    With `reset_running_requests` those go back into the queue, and are computed again from their tokens.
    With `reset_connector` pages in the host's memory (`swap_space`) are forgotten too, and a loaded cache is
    left; files stay.
    """
    with llm._session.turn():
        engine = llm.engine
        if engine.scheduler.running and not reset_running_requests:
            return False
        engine.vacate()
        if reset_connector:
            engine.tiers.replaced(engine.everything)
        return True


def sleep(llm: "LLM", level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
    """Take no steps until `wake_up`: whatever needs one raises RuntimeError. Requests may still be queued.

    Level 0 is only that. Level 1 moves the parameters to the host and drops the cache; level 2 discards the
    parameters too, and `update_params` has to bring others. Nothing is compiled after it. Unfinished requests
    are aborted, run to their end before ("wait"), or go on after the sleep ("keep"). Raises ValueError for
    another level or mode.
    """
    if level not in (0, 1, 2):
        raise ValueError(f"level={level!r} is not allowed: 0, 1 or 2")
    if mode not in ("abort", "wait", "keep"):
        raise ValueError(f"mode={mode!r} is not allowed: 'abort', 'wait' or 'keep'")
    llm._session.settle(mode)
    with llm._session.turn():
        llm.engine.sleep(level)
    give_back()


def wake_up(llm: "LLM", tags: Sequence[str] | None = None) -> None:
    """Restore what `sleep` released: all, or of "weights", "kv_cache" and "scheduling" those named.

    Requests run again once both the weights and the cache are back. Raises ValueError for another tag.
    """
    with llm._session.turn():
        llm.engine.wake_up(TAGS if tags is None else tags)


def is_sleeping(llm: "LLM") -> bool:
    return llm.engine.is_sleeping


# ---------------------------------------------------------------- what it does


def get_metrics(llm: "LLM") -> list[Metric]:
    """Counts since the engine's start under the names that vLLM gives them."""
    with llm._session.turn():
        return snapshot(llm.engine)


def start_profile(llm: "LLM", profile_prefix: str | None = None) -> Path:
    """Record what host and device do (jax.profiler) until `stop_profile`, in the folder that is returned.

    It is the `torch_profiler_dir` of the option `profiler_config` or `duetto-profile` in the working
    directory, or `profile_prefix` in there. Raises RuntimeError while another is recorded.
    """
    chosen = (llm.options.profiler_config or {}).get("torch_profiler_dir")
    folder = Path(chosen or PROFILES, profile_prefix or "").absolute()
    jax.profiler.start_trace(folder)
    print(f"duetto: recording a profile in {folder}", file=sys.stderr)
    return folder


def stop_profile(llm: "LLM") -> None:
    """Write the profile. Raises RuntimeError where none is recorded."""
    with llm._session.turn():
        jax.profiler.stop_trace()
    print("duetto: the profile is written; XProf, TensorBoard and Perfetto show it", file=sys.stderr)


def get_world_size(llm: "LLM", include_dp: bool = True) -> int:
    """The devices that the model is spread over."""
    return len(devices(llm.engine.params))


# ---------------------------------------------------------------- what is not here


def refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """A method that says what to call instead of it."""

    def method(llm: "LLM", *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"LLM.{name} is not here: {instead}")

    method.__name__, method.__doc__ = name, f"Raises NotImplementedError: {instead}."
    return method


LIKELIHOOD = "LLM.log_likelihood gives the log-probabilities of texts or continuations under this model"
EMBEDS = "LLM.embed gives embeddings"
WEIGHTS = "LLM.params are the weights, LLM.update_params serves others, and LLM.engine is the engine"
encode = refused("encode", EMBEDS)
reward = refused("reward", f"models are served without heads that reward; {EMBEDS}")
classify = refused("classify", f"models are served to generate, and have no classes; {LIKELIHOOD}")
score = refused("score", f"in vLLM it is the similarity of two texts by a pooling model; {LIKELIHOOD}")
collective_rpc = refused("collective_rpc", f"the engine runs in this process, without workers; {WEIGHTS}")
apply_model = refused("apply_model", f"there is no torch module; {WEIGHTS}")
