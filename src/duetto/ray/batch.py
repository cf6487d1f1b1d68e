"""Batch inference on Ray. `Predictor` needs no Ray: any caller may give it batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from ..sampling.params import SamplingParams
from ..serve.jobs.workers.worker import Worker, WorkerInfo, WorkerLost, WorkerRequest
from ..serve.llm.llm import LLM
from ..serve.text.outputs import RequestOutput

ERROR = "__inference_error__"
Row = dict[str, Any]


@dataclass(frozen=True)
class ProcessorConfig:
    """Configuration of a processor, under the names of `vLLMEngineProcessorConfig`.

    model_source: folder of the model, or its id on the hub.
    engine_kwargs: keywords of `LLM`.
    concurrency: number of actors, or minimum and maximum.
    batch_size: rows of one call of an actor.
    resources: Ray resources of an actor, such as `{"num_gpus": 1}`.
    sampling_params: defaults of the rows.
    should_continue_on_error: a wrong row gets its error in the column `__inference_error__`; otherwise it
    ends the job.
    """

    model_source: str | None = None
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int | tuple[int, int] = 1
    batch_size: int = 64
    resources: Mapping[str, float] = field(default_factory=dict)
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    should_continue_on_error: bool = False


class Predictor:
    """Engine that answers batches of rows: mappings of columns, or pandas frames.

    It adds the columns `generated_text`, `generated_tokens`, `num_generated_tokens`, `num_input_tokens` and
    `__inference_error__` (empty without an error). A row has `messages`, `prompt` or `tokenized_prompt`, and
    may have `sampling_params`. The default seed is the row's number in the batch.
    """

    def __init__(self, config: ProcessorConfig):
        self.config = config
        keywords: dict[str, Any] = {"use_tqdm_on_load": False} | dict(config.engine_kwargs)
        self.llm = LLM(config.model_source, **keywords)
        self.default_params = self.llm.get_default_sampling_params()

    def __call__(self, batch: Any) -> Any:
        is_frame = hasattr(batch, "assign")
        columns = {name: list(batch[name]) for name in batch}
        count = len(next(iter(columns.values()), []))
        rows = [{name: column[i] for name, column in columns.items()} for i in range(count)]
        answers = self._answer_rows(rows)
        new = {
            name: [row[name] for row in answers]
            for name in (answers[0] if answers else answer_columns(None, ""))
        }
        return batch.assign(**new) if is_frame else columns | new

    def _answer_rows(self, rows: Sequence[Row]) -> list[Row]:
        submitted: dict[str, int] = {}
        answers: list[Row] = [{}] * len(rows)
        for i, row in enumerate(rows):
            try:
                submitted[self._submit(i, row)] = i
            except Exception as error:
                if not self.config.should_continue_on_error:
                    self._abort(submitted)
                    raise
                answers[i] = answer_columns(None, f"{type(error).__name__}: {error}")
        while submitted:
            for output in self.llm.step():
                if (row_index := submitted.pop(output.request_id, None)) is not None:
                    answers[row_index] = answer_columns(output, "")
        return answers

    def _submit(self, i: int, row: Row) -> str:
        params = self._sampling_params(row.get("sampling_params"), i)
        if row.get("tokenized_prompt") is not None:
            prompt: Any = [int(token) for token in row["tokenized_prompt"]]
        elif row.get("messages") is not None:
            prompt = self.llm.chat_prompt([dict(message) for message in row["messages"]])
        elif isinstance(row.get("prompt"), str):
            prompt = row["prompt"]
        else:
            raise ValueError("a row has messages, prompt or tokenized_prompt")
        return self.llm.add_request(prompt, params)

    def _sampling_params(self, row_params: Any, i: int) -> SamplingParams:
        stated = {
            name: to_python(value) for name, value in dict(row_params or {}).items() if value is not None
        }
        merged = {
            name: getattr(self.default_params, name) for name in ("temperature", "top_p", "top_k", "min_p")
        }
        return SamplingParams.from_dict(merged | {"seed": i} | dict(self.config.sampling_params) | stated)

    def _abort(self, submitted: Mapping[str, int]) -> None:
        for id in submitted:
            self.llm.abort(id)
        while self.llm.has_unfinished_requests():
            self.llm.step()


def to_python(value: Any) -> Any:
    """Return a value with numpy's types converted to Python's."""
    return value.tolist() if hasattr(value, "tolist") else value


def answer_columns(output: RequestOutput | None, error: str) -> Row:
    """Return the new columns of a row."""
    completion = None if output is None else output.outputs[0]
    return {
        "generated_text": "" if completion is None else completion.text,
        "generated_tokens": [] if completion is None else list(completion.token_ids),
        "num_generated_tokens": 0 if completion is None else len(completion.token_ids),
        "num_input_tokens": 0 if output is None else len(output.prompt_token_ids),
        ERROR: error,
    }


# ---------------------------------------------------------------- Ray


def build_processor(
    config: ProcessorConfig,
    preprocess: Callable[[Row], Row] | None = None,
    postprocess: Callable[[Row], Row] | None = None,
) -> Callable[[Any], Any]:
    """Return a function from dataset to dataset, which applies `preprocess`, a `Predictor` and `postprocess`.

    Rows with an error skip `postprocess`.
    """

    def processor(dataset: Any) -> Any:
        strategy = actor_pool(config.concurrency)
        if preprocess is not None:
            dataset = dataset.map(preprocess)
        dataset = dataset.map_batches(
            Predictor,
            fn_constructor_args=(config,),
            batch_size=config.batch_size,
            compute=strategy,
            **config.resources,
        )
        return dataset if postprocess is None else dataset.map(partial(postprocess_row, postprocess))

    return processor


def actor_pool(concurrency: int | tuple[int, int]) -> Any:
    """Return Ray's pool of actors: of one size, or between two."""
    make = import_module("ray.data").ActorPoolStrategy
    if isinstance(concurrency, int):
        return make(size=concurrency)
    return make(min_size=concurrency[0], max_size=concurrency[1])


def postprocess_row(postprocess: Callable[[Row], Row], row: Row) -> Row:
    """Apply `postprocess` to a row without an error."""
    return row if row[ERROR] else postprocess(row) | {ERROR: ""}


class RayBackend:
    """Backend whose workers are Ray actors, for `serve/jobs/workers/worker_pool.py`. Raises ValueError
    without Ray."""

    def __init__(self, arguments: Mapping[str, Any], options: Mapping[str, Any]):
        try:
            self._ray = import_module("ray")
        except ImportError:
            raise ValueError("ray is not allowed: there is no ray; pip install 'duetto[ray]'") from None
        if not self._ray.is_initialized():
            self._ray.init(log_to_driver=False, include_dashboard=False)
        actor_options = {"max_restarts": 0} | dict(options)
        self._make = partial(self._ray.remote(Worker).options(**actor_options).remote, **arguments)
        self._workers: list[Any] = []

    def start_worker(self) -> Any:
        self._workers.append(self._make())
        return self._workers[-1]

    def describe(self, worker: Any) -> WorkerInfo:
        return self.result(worker.describe.remote())

    def run_requests(self, worker: Any, requests: Sequence[WorkerRequest]) -> Any:
        return worker.run_requests.remote(list(requests))

    def wait_any(self, futures: Sequence[Any]) -> Any:
        (future,), _ = self._ray.wait(list(futures), num_returns=1)
        return future

    def result(self, future: Any) -> Any:
        """Wait for a result. Raises WorkerLost if the actor died, RuntimeError for an error of its engine."""
        try:
            return self._ray.get(future)
        except self._ray.exceptions.RayActorError as error:
            raise WorkerLost(str(error).strip().splitlines()[0]) from None
        except self._ray.exceptions.RayTaskError as error:
            raise RuntimeError(str(error)) from None

    def report(self, worker: Any, explained: bool) -> dict[str, Any]:
        return self.result(worker.report.remote(explained))

    def close(self) -> None:
        for worker in self._workers:
            self._ray.kill(worker)
