"""Several engines elsewhere as one, which are lost now and then."""

import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.batch import LINES, MODEL, FakeEngine, characters, runner

from duetto import SamplingParams
from duetto.sampling.custom_processors import LogitsProcessor
from duetto.serve.jobs.workers.worker import Worker, WorkerInfo, WorkerLost
from duetto.serve.jobs.workers.worker_pool import WorkerPool
from duetto.serve.options.engine import EngineOptions


class FakeBackend:
    """Workers that are lost with some probability whenever they are asked for what they have promised."""

    def __init__(self, loss: float = 0.0, products: Any = (None,), realms: Any = ("",), processors: Any = ()):
        self.processors = processors
        self.draw, self.loss, self.products = random.Random(0), loss, list(products)
        self.realms = list(realms)
        self.hired, self.is_closed = [], False

    def start_worker(self) -> FakeEngine:
        self.hired.append(FakeEngine())
        return self.hired[-1]

    def describe(self, worker: FakeEngine) -> WorkerInfo:
        place = self.hired.index(worker)
        product, realm = (of[min(place, len(of) - 1)] for of in (self.products, self.realms))
        return WorkerInfo(256, 64, (0,), product, realm=realm, processors=self.processors)

    def run_requests(self, worker: FakeEngine, requests: Any) -> Any:
        for id, prompt, params, adapter in requests:
            worker.add_request(prompt, params, id, lora_request=adapter)
        return worker, worker.step()

    def wait_any(self, futures: Any) -> Any:
        return self.draw.choice(futures)

    def result(self, future: Any) -> Any:
        if self.draw.random() < self.loss:
            raise WorkerLost("killed")
        return future[1]

    def report(self, worker: FakeEngine, explained: bool) -> dict[str, Any]:
        return worker.report(explained)

    def close(self) -> None:
        self.is_closed = True


def remote(backend: FakeBackend, count: int = 3) -> WorkerPool:
    return WorkerPool(backend, count, characters(), EngineOptions())


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_a_job_on_lost_workers_has_the_same_bytes(tmp_path, loss):
    lines = [*LINES, {"prompt": "x" * 100}, *({"prompt": f"q{i}", "max_tokens": 9} for i in range(40))]
    one = runner(tmp_path)(lines, name="one.jsonl")
    backend = FakeBackend(loss)
    several = runner(tmp_path)(lines, engine=remote(backend), name="several.jsonl", in_flight=12)
    assert one.code == several.code == 0 and backend.is_closed
    without = [{k: v for k, v in answer.items() if k != "error"} for answer in one.answers]
    assert without == [{k: v for k, v in answer.items() if k != "error"} for answer in several.answers]
    assert sum("error" in answer for answer in several.answers) == 2
    assert (len(backend.hired) > 3) == (loss > 0)
    assert sum(bool(engine.ran) for engine in backend.hired) >= 3


def test_a_job_on_one_engine_goes_on_with_several(tmp_path):
    run, lines = runner(tmp_path), [{"prompt": f"q{i}"} for i in range(30)]
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(lines, engine=FakeEngine(die_after=4), in_flight=6)
    backend = FakeBackend()
    done = run(lines, engine=remote(backend), in_flight=6)
    assert done.code == 0 and sum(len(engine.ran) for engine in backend.hired) == 22
    assert done.answers == run(lines, name="other.jsonl").answers and MODEL


def test_workers_that_are_always_lost_end_the_job():
    engine = remote(FakeBackend(loss=1.0))
    engine.add_request([1], SamplingParams(), "a")
    with pytest.raises(RuntimeError, match="6 workers were lost, one after the other: killed"):
        for _ in range(9):
            engine.step()
    assert engine.num_lost == 6


DIFFERENT = [
    ({"products": ("a", "b")}, "a worker's products are b, the first one's a"),
    ({"realms": ("a", "b")}, "a worker has other weights"),
]


@pytest.mark.parametrize("own, message", DIFFERENT)
def test_workers_with_other_products_or_weights_are_refused(own, message):
    engine = remote(FakeBackend(**own))
    for i in range(6):
        engine.add_request([1], SamplingParams(), str(i))
    assert engine.report()["workers"] == 3
    with pytest.raises(RuntimeError, match=message):
        for _ in range(6):
            engine.step()


def test_what_no_worker_could_run_is_refused_at_once():
    engine = remote(FakeBackend())
    assert engine.longest_prompt == 63
    with pytest.raises(ValueError, match="outside the vocabulary of 256"):
        engine.add_request([300], SamplingParams(), "a")
    with pytest.raises(ValueError, match="save_cache is not allowed"):
        engine.save_cache("x")
    assert engine.step() == []


def test_numbers_for_processors_are_checked_without_the_functions():
    """A pool's driver has no device to trace them on: their knobs come from a worker."""
    own = LogitsProcessor("bias", (("strength", 0.0),), "digest", lambda *_: None)
    backend = FakeBackend(processors=pickle.loads(pickle.dumps((own,))))
    options = EngineOptions(logits_processors=["no_such_module:bias"])
    engine = WorkerPool(backend, 1, characters(), options)
    engine.add_request([1], SamplingParams(extra_args={"strength": 1.0}), "a")
    with pytest.raises(ValueError, match="unknown name 'other'.* known are strength"):
        engine.add_request([1], SamplingParams(extra_args={"other": 1.0}), "b")


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({}, "bfloat16"),
        ({"products": None}, "bfloat16"),
        ({"products": "a"}, "a"),
        ({"cpu_kernels_target": "duetto_x"}, "bfloat16, duetto_x"),
    ],
)
def test_a_cpu_workers_products_are_its_dtype_and_kernels(report: dict[str, Any], said: str):
    """Two hosts may choose other ones."""
    worker = object.__new__(Worker)
    worker._llm = SimpleNamespace(report=lambda _: {"dtype": "bfloat16"} | report)  # type: ignore[assignment]
    assert worker.report()["products"] == said
