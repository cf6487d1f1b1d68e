"""A server whose weights are replaced while it answers, with its log of all that."""

import json
import shutil
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from cases.requests import SMALLEST

from duetto.checkpoints import huggingface
from duetto.model.config import ModelConfig
from duetto.model.transformer import Decoder, decoder_spec
from duetto.serve.jobs.verify.claims import Claims

BODY = {"prompt": "class Error(", "max_tokens": 200, "seed": 5, "ignore_eos": True, "return_token_ids": True}
# Wide enough that an answer is not over before its weights are replaced, and of one layer to compile.
CONFIG = ModelConfig.uniform(2048, 256, 1536, 1, 4, 2, 64, tied_embeddings=True)


def weights(gain: float) -> Decoder:
    rng = np.random.default_rng(0)
    draw = lambda s: np.float32(gain * (s.mean + s.scale * rng.standard_normal(s.shape)))
    return jax.tree.map(lambda spec: jax.device_put(draw(spec)), decoder_spec(CONFIG))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two sets of weights of a random model."""
    place = tmp_path_factory.mktemp("weights")
    for version, gain in (("old", 1.0), ("new", 1.5)):
        huggingface.save_hf(place / version, CONFIG, weights(gain), "float32")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(SMALLEST, name), place / "old")
    return place


def test_weights_are_replaced_while_a_request_is_under_way(starting, folder, tmp_path):
    log = tmp_path / "log"
    server = starting("--model", str(folder / "old"), "--weights-dir", str(folder), "--audit-log", str(log))
    answers: list[dict] = []

    def ask() -> None:
        with server.http() as http:
            answers.append(http.post("/v1/completions", json=BODY | {"logprobs": 0}).json())

    with server.http() as http:
        assert http.post("/v1/completions", json=BODY | {"max_tokens": 4}).status_code == 200
        assert http.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
        assert http.get("/is_paused").json() == {"is_paused": True}
        asking = threading.Thread(target=ask)
        asking.start()
        assert http.post("/resume").json() == {"status": "resumed"}
        while server.gauges().get("vllm:generation_tokens_total", 0) < 12:
            time.sleep(0.01)
        assert http.post("/update_weights", json={"path": "new"}).json() == {"version": 1}
        for refused in (
            {"path": "../new"}, {"path": "none"}, {"path": "new\0"}, {"path": "x" * 5000},
            {"path": "new", "mode": "later"}, {"path": 1}, {"way": "x"},
        ):  # fmt: skip
            assert http.post("/update_weights", json=refused).status_code == 400, refused
        assert http.post("/pause", params={"mode": "later"}).status_code == 400
        twice = http.post("/pause?mode=keep&mode=wait").json()["error"]
        assert twice["message"] == 'query="mode" is not allowed: each name once'
        asking.join()
        assert http.post("/update_weights", json={"path": "old", "mode": "wait"}).json() == {"version": 2}
        again = http.post("/v1/completions", json=BODY).json()["choices"][0]
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "return_token_ids": True}
        answered = http.post("/v1/chat/completions", json=chat)
        with http.stream("POST", "/v1/completions", json=BODY | {"stream": True, "max_tokens": 5}) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert server.stop() == 0
    ((choice,),) = [a["choices"] for a in answers]
    (_, first), (at, second) = choice["weights"]
    assert (first, second) == (0, 1) and 0 < at < 200 and len(choice["token_ids"]) == 200
    assert again["weights"] == [[0, 2]] and again["prompt_token_ids"] == choice["prompt_token_ids"]
    assert (
        choice["token_ids"][:at] == again["token_ids"][:at] != []
        and choice["token_ids"] != again["token_ids"]
    )
    if answered.status_code == 200:  # the model that ships has no chat template
        assert len(answered.json()["choices"][0]["token_ids"]) == 3 and answered.json()["prompt_token_ids"]
    assert [t for e in events for t in e["choices"][0]["token_ids"]] == again["token_ids"][:5]
    claims = Claims.from_log(log)
    (swapped,) = (c for c in claims.requests if len(c.entry.weights) > 1)
    assert swapped.entry.tokens == choice["token_ids"] and not claims.broken
    (start,) = claims.starts.values()
    assert start.versions[0] == start.versions[2] != start.versions[1]


def test_a_paused_server_ends(starting, folder, tmp_path):
    """Requests under way end with an error, also those that a pause finds after the signal."""
    kept = tmp_path / "cache"
    server = starting("--model", str(folder / "old"), "--weights-dir", str(folder), "--save-cache", str(kept))
    errors: list[str] = []

    def ask() -> None:
        with (
            server.http() as http,
            http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as reply,
        ):
            errors.extend(line for line in reply.iter_lines() if "error" in line)

    asking = threading.Thread(target=ask)
    with server.http() as http:
        asking.start()
        while server.gauges().get("vllm:generation_tokens_total", 0) < 12:
            time.sleep(0.01)
        paused = http.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        assert paused.json() == {"status": "paused"}
    assert server.stop() == 0, server.said
    asking.join()
    assert len(errors) == 1 and "the server is ending, and it is paused" in errors[0]
    assert any(kept.iterdir()) and not any("Traceback" in line for line in server.said)


def test_a_trainer_samples_token_ids_around_an_update(starting, folder):
    """The requests that SkyRL's client sends for completions and pauses, and those that it sends in vain."""
    server = starting("--model", str(folder / "old"), "--weights-dir", str(folder))
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 8,
        "logprobs": 0,
        "seed": 3,
    }
    body = {"model": "demo", "prompt": [5, 17, 200], "return_token_ids": True, "ignore_eos": True} | sampling

    def sample(http) -> tuple[list[int], list[float], list[list[int]]]:
        reply = http.post("/v1/completions", json=body, headers={"X-Session-ID": "trajectory-1"}).json()
        (choice,) = reply["choices"]
        assert choice["prompt_token_ids"] == body["prompt"] and choice["finish_reason"] == "length"
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["weights"]

    with server.http() as http:
        before = sample(http)
        ids, logprobs, version = before
        assert len(ids) == len(logprobs) == 8 and version == [[0, 0]]
        text = http.post("/detokenize", json={"model": "demo", "tokens": ids}).json()["prompt"]
        assert isinstance(text, str)
        query = {"mode": "keep", "clear_cache": "false"}
        assert http.post("/pause", params=query).json() == {"status": "paused"}
        updated = http.post("/update_weights", json={"path": "new"})
        assert http.post("/resume").json() == {"status": "resumed"}
        assert updated.json() == {"version": 1}
        again = sample(http)
        assert again[2] == [[0, 1]] and again[0] != ids
        assert http.post("/update_weights", json={"update_info": {"names": []}}).status_code == 400
        for path in (
            "/inference/v1/generate",
            "/collective_rpc",
            "/sleep",
            "/wake_up",
            "/reset_prefix_cache",
        ):
            assert http.post(path, json={}).status_code == 404, path
    assert server.stop() == 0
