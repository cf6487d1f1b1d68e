"""`LLMEngine`: an `LLM` that the caller advances step by step, with vLLM's names and order of arguments."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..checkpoints.folders import read_config_json
from ..lora.request import LoRARequest
from ..sampling.params import SamplingParams
from ..serve.llm.input_processor import PromptInput
from ..serve.llm.llm import LLM
from ..serve.llm.vllm import check_vllm_arguments
from ..serve.text.outputs import RequestOutput
from .progress import Progress


class LLMEngine:
    """Engine of an `LLM`, whose requests are added and then advanced by `step`.

    All other attributes, such as `reset_prefix_cache`, are the `LLM`'s.
    """

    def __init__(self, llm: LLM):
        self.llm = llm
        self._progress: dict[str, Progress] = {}

    @classmethod
    def from_engine_args(cls, engine_args: Any, *unused: Any, **ignored: Any) -> "LLMEngine":
        """Start an engine with the keywords of an `EngineArgs`. Arguments about logs and workers are
        ignored."""
        return cls(LLM.from_engine_args(engine_args))

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
    ) -> str:
        """Queue a request for `step`, and return its id. Raises ValueError or TypeError."""
        check_vllm_arguments(tokenization_kwargs=tokenization_kwargs)
        progress = Progress(params.output_kind)
        self.llm.add_request(prompt, params, request_id, priority, lora_request)
        self._progress[request_id] = progress
        return request_id

    def step(self) -> list[RequestOutput]:
        """Advance all requests by one step, and return the outputs that are due.

        An output is due if a request has new tokens, as its `output_kind` states, or has ended. Requests that
        the `LLM` itself has queued are returned when they end.
        """
        ended = {subscription.id: subscription for subscription in self.llm.session.step()}
        reports = [ended[id].make_output() for id in ended if id not in self._progress]
        for id, progress in list(self._progress.items()):
            subscription = ended.get(id) or self.llm.session.subscriptions.get(id)
            if subscription and (report := progress.take_due_output(subscription)):
                reports.append(report)
            if subscription is None or progress.has_ended:
                del self._progress[id]
        return reports

    def abort_request(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests now, without a further output. Unknown ids are ignored."""
        for id in [request_id] if isinstance(request_id, str) else request_id:
            self._progress.pop(id, None)
            if subscription := self.llm.session.subscriptions.get(id):
                self.llm.session.drop([subscription])

    def get_num_unfinished_requests(self) -> int:
        return len(self._progress)

    def has_unfinished_requests(self) -> bool:
        return bool(self._progress)

    @property
    def model_config(self) -> "EngineModelConfig":
        return EngineModelConfig(self.llm)

    @property
    def engine_core(self) -> "EngineCore":
        return EngineCore(self.llm)

    def __getattr__(self, name: str) -> Any:
        if name == "llm":
            raise AttributeError(name)
        return getattr(self.llm, name)


class EngineModelConfig:
    """Model that is served, as scripts for vLLM read it.

    `hf_config` and `hf_text_config` have the fields of config.json; they are empty for parameters without a
    folder.
    """

    def __init__(self, llm: LLM):
        fields = {} if llm.folder is None else read_config_json(Path(llm.folder))
        self.hf_config = self.hf_text_config = SimpleNamespace(**fields)
        self.max_model_len = llm.engine.sizes.max_model_len


class EngineCore:
    """Methods of vLLM's engine core that scripts call."""

    def __init__(self, llm: LLM):
        self._llm = llm

    def save_sharded_state(
        self, path: str | Path, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Write the parameters for `load_format="sharded_state"`, like `LLM.save_params`. Orbax names the
        files."""
        self._llm.save_params(path)
