"""A model on Ray Serve: replicas come, go, are killed and replaced, under streams and whole answers."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from cases.waiting import until
from suite.strict import STRICT

import duetto
from duetto import LLM
from duetto.ray.serve import LLMConfig, build_openai_app
from duetto.serve.runtime.multihost.supervisor import free_port

pytestmark = [pytest.mark.extras, pytest.mark.minutes, pytest.mark.filterwarnings("default")]
ENGINE: dict[str, Any] = {
    "max_num_seqs": 8, "max_prefill_tokens": 64, "max_model_len": 512, "page_size": 16,
    "max_prefill_delay": 0.0, "background_compilation": False, "dtype": "float32",
}  # fmt: skip
RANDOM = {"load_format": "dummy"}
LIMIT = 600.0
ASKED = {"max_tokens": 300, "temperature": 0.9, "ignore_eos": True}
FEWER = ASKED | {"max_tokens": 100}  # of processes that wait for each other at every token
COUNT = 6
QUICK = {  # metrics for the autoscaler twice a second, and replicas of no lower priority than this process
    "RAY_worker_niceness": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_RECORD_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}


class Cluster:
    """Ray Serve on this machine, with one application."""

    def __init__(self, ray: Any, serve: Any, port: int):
        self.nodes, self.serve, self.url = ray.nodes, serve, f"http://127.0.0.1:{port}/demo"

    def run(self, deployment: dict[str, Any], engine: dict[str, Any] | None = None, **config: Any) -> None:
        """Deploy the demo model, or an update of it, and wait until all of its replicas run."""
        own = {"ray_actor_options": {"num_cpus": 0}, "health_check_period_s": 1} | deployment
        made = LLMConfig(
            {"model_id": "demo"}, ENGINE | (engine or {}), own, router_kwargs={"page_size": 16}, **config
        )
        ingress = {"ray_actor_options": {"num_cpus": 0}}
        app = build_openai_app({"llm_configs": [made], "ingress_deployment_config": ingress})
        self.serve.run(app, name="demo", route_prefix="/demo")

    @property
    def running(self) -> int:
        found = self.serve.status().applications["demo"].deployments["engine"].replica_states
        return found.get("RUNNING", 0)

    def processes(self, title: bytes = b"ServeReplica:demo:engine") -> list[int]:
        """Process ids of the replicas, or of other actors."""
        titles = {path.parent.name: path for path in Path("/proc").glob("[0-9]*/cmdline")}
        return [int(pid) for pid, path in titles.items() if title in read(path)]

    def metrics(self) -> str:
        """Ray's metrics of this machine."""
        return httpx.get(
            f"http://127.0.0.1:{self.nodes()[0]['MetricsExportPort']}/metrics", timeout=LIMIT
        ).text

    def count(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=LIMIT).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (QUICK | STRICT).items():
            patch.setenv(name, value)
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("PYTHONPATH", str(Path(duetto.__file__).parents[1]), prepend=os.pathsep)
        ray = pytest.importorskip("ray", reason="needs duetto[ray]")
        serve = pytest.importorskip("ray.serve", reason="needs duetto[ray]")
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        port = free_port()
        serve.start(http_options={"port": port})
        yield Cluster(ray, serve, port)
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
def fresh(cluster: Cluster) -> Iterator[Cluster]:
    yield cluster
    cluster.serve.delete("demo")


@pytest.fixture(scope="module")
def alone() -> dict[str, list[str]]:
    """Answers of one engine, by its weights."""
    return {"demo": answers(), "random": answers(**RANDOM)}


def bodies(asked: Mapping[str, Any] = ASKED) -> list[dict[str, Any]]:
    return [{**asked, "prompt": f"def f{i}(x):\n", "seed": i} for i in range(COUNT)]


def answers(asked: Mapping[str, Any] = ASKED, **engine: Any) -> list[str]:
    prompts = [body["prompt"] for body in bodies()]
    with LLM(use_tqdm_on_load=False, **ENGINE, **engine) as llm:
        default = llm.get_default_sampling_params()
        params = [replace(default, seed=body["seed"], **asked) for body in bodies()]
        return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]


def whole(url: str, i: int) -> tuple[str, str]:
    reply = httpx.post(f"{url}/v1/completions", json=bodies()[i], timeout=LIMIT)
    return reply.raise_for_status().json()["choices"][0]["text"], ""


def wholes(url: str) -> list[str]:
    """All answers, asked for at once."""
    with ThreadPoolExecutor(COUNT) as pool:
        return [text for text, _ in pool.map(partial(whole, url), range(COUNT))]


def stream(
    url: str, i: int, came: threading.Semaphore | None = None, asked: Mapping[str, Any] = ASKED
) -> tuple[str, str]:
    """The text of a stream and the error that it ended with; `came` is released once there is some text."""
    text = error = ""
    body = bodies(asked)[i] | {"stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT) as reply:
        assert reply.status_code == 200
        for line in (line for line in reply.iter_lines() if line.startswith("data: {")):
            event = json.loads(line[6:])
            error = event.get("error", {}).get("message", error)
            was_short = len(text) <= 20
            text += event["choices"][0]["text"] if "choices" in event else ""
            if came is not None and was_short and len(text) > 20:
                came.release()
    return text, error


@contextmanager
def under_way(
    url: str, calls: Any = (stream,), asked: Mapping[str, Any] = ASKED
) -> Iterator[list[tuple[int, Future[tuple[str, str]]]]]:
    """Requests of each kind whose streams have begun; at the end all are answered."""
    came = threading.Semaphore(0)
    with ThreadPoolExecutor(2 * COUNT) as pool:
        requests = [(i, pool.submit(stream, url, i, came, asked)) for i in range(COUNT)]
        requests += [
            (i, pool.submit(call, url, i)) for call in calls if call is not stream for i in range(COUNT)
        ]
        assert all(came.acquire(timeout=LIMIT) for _ in range(COUNT))
        yield requests


def test_replicas_follow_the_load_and_all_answers_are_right(fresh, alone):
    scaling = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1, "downscale_delay_s": 3}
    fresh.run({"autoscaling_config": scaling | {"look_back_period_s": 2}}, target_tokens_in_flight=300)
    assert fresh.running == 1
    found: list[tuple[int, str, str]] = []
    is_over = threading.Event()

    def ask(i: int) -> None:
        while not is_over.is_set():
            found.append((i, *(stream, whole)[len(found) % 2](fresh.url, i)))

    with ThreadPoolExecutor(COUNT) as pool:
        asking = [pool.submit(ask, i) for i in range(COUNT)]
        try:
            until(lambda: fresh.running == 2)
            enough = len(found) + 2 * COUNT  # each asks once more
            until(lambda: len(found) >= enough or any(one.done() for one in asking))
        finally:
            is_over.set()
        [one.result() for one in asking]
    until(lambda: found.append((0, *stream(fresh.url, 0))) or fresh.running == 1)
    assert [(i, text, error) for i, text, error in found if (text, error) != (alone["demo"][i], "")] == []
    print(f"{len(found)} answers")


def test_answers_outlive_a_replica_that_is_killed(fresh, alone):
    fresh.run({"num_replicas": 2})
    until(lambda: len(fresh.processes()) == 2)
    with under_way(fresh.url, (stream, whole)) as asked:
        os.kill(fresh.processes()[0], signal.SIGKILL)
        found = [(i, one.result(LIMIT)) for i, one in asked]
    assert [(i, one) for i, one in found if one != (alone["demo"][i], "")] == []
    assert fresh.count("duetto:router_resumed_total") > 0
    until(lambda: fresh.running == 2)  # Serve has replaced it


def test_prompts_go_to_their_pages_and_ray_has_the_metrics(fresh):
    fresh.run({"num_replicas": 2})
    body = {"prompt": "import os\n" * 40, "max_tokens": 1, "seed": 0}
    cached = []
    for _ in range(6):
        reply = httpx.post(f"{fresh.url}/v1/completions", json=body, timeout=LIMIT).json()
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert not cached[0] and all(cached[1:])
    names = {"ray_vllm_num_requests_running", "ray_duetto_tokens_in_flight", "ray_vllm_prompt_tokens_total"}
    until(lambda: all(f"\n{name}{{" in fresh.metrics() for name in names))


def test_an_update_joins_no_two_models(fresh, alone):
    """First with time for the last answers of the old replicas, then without."""
    old, new = alone["demo"], alone["random"]
    assert all(one != other for one, other in zip(old, new, strict=True))
    fresh.run({"num_replicas": 2})
    with under_way(fresh.url) as asked:
        fresh.run({"num_replicas": 2}, RANDOM)
        found = [(i, one.result(LIMIT)) for i, one in asked]
    assert [(i, one) for i, one in found if one != (old[i], "")] == []
    assert wholes(fresh.url) == new
    hasty = {"num_replicas": 2, "graceful_shutdown_timeout_s": 0.1, "graceful_shutdown_wait_loop_s": 0.1}
    fresh.run(hasty, RANDOM)
    with under_way(fresh.url, (stream, whole)) as asked:
        fresh.run(hasty)
        found = [(i, one.result(LIMIT)) for i, one in asked]
    for i, (text, error) in found:
        assert text in (old[i], new[i]) if not error else new[i].startswith(text), (i, text, error)
    print(f"{sum(bool(error) for _, (_, error) in found)} streams ended with an error")
    assert wholes(fresh.url) == old


def test_one_model_over_two_actors_outlives_either(fresh):
    """Their tokens are those of one process with two devices."""
    program = (
        "import json, test_ray_serve as t; print(json.dumps(t.answers(t.FEWER, tensor_parallel_size=2)))"
    )
    own = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "JAX_PLATFORMS": "cpu"}
    own["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=True)
    expected = json.loads(done.stdout.splitlines()[-1])
    actor = {"ray_actor_options": {"num_cpus": 1}}
    fresh.run(actor, {"nnodes": 2, "tensor_parallel_size": 2}, server_kwargs={"queue_timeout": LIMIT})
    for title in (b"ray::RankActor", b"ServeReplica:demo:engine"):
        with under_way(fresh.url, asked=FEWER) as asked:
            (victim,) = fresh.processes(title)
            os.kill(victim, signal.SIGKILL)
            found = [(i, one.result(LIMIT)) for i, one in asked]
        assert [(i, one) for i, one in found if one != (expected[i], "")] == []
    assert fresh.count("duetto:router_resumed_total") > 0
