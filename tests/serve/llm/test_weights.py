"""Other weights under requests that are under way, pauses, and log-probabilities of tokens that are given."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.requests import GREEDY, IDS, PROMPTS, SEEDED, exact

from duetto import LLM, RequestOutput, SamplingParams
from duetto.checkpoints import huggingface
from duetto.model.transformer import Decoder
from duetto.model.tree import leaves_by_path
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER, read_model

pytestmark = pytest.mark.usefixtures("nothing_is_left")
LONG = replace(SEEDED, max_tokens=24)
BOTH = [(IDS, LONG), (PROMPTS[1], replace(GREEDY, max_tokens=24, logprobs=0, prompt_logprobs=0))]


@pytest.fixture(scope="module")
def other(tiny) -> Decoder:
    return jax.tree.map(lambda x: jnp.flip(x, 0), tiny.params)


@pytest.fixture
def restored(llm, tiny) -> Iterator[None]:
    yield
    llm.update_params(tiny.params)


def begun(llm: LLM, steps: int = 8) -> list[str]:
    ids = [llm.add_request(prompt, params) for prompt, params in BOTH]
    for _ in range(steps):
        llm.step()
    return ids


def ended(llm: LLM, ids: list[str]) -> list[RequestOutput]:
    found = {}
    while llm.has_unfinished_requests():
        found |= {output.request_id: output for output in llm.step()}
    return [found[id] for id in ids]


def continued(llm: LLM, prompt: list[int], params: SamplingParams, known: list[int]) -> RequestOutput:
    """A request whose first tokens are given."""
    subscription = llm.input_processor.make_subscription(prompt, params, resumed_outputs=[known])
    llm.session.submit_and_run([subscription])
    return subscription.make_output()


def test_kept_requests_continue_with_the_new_weights(llm, other, restored):
    before = [o.outputs[0] for o in (llm.generate(*request, use_tqdm=False)[0] for request in BOTH)]
    compiled = llm.report()["compilations"]
    ids = begun(llm)
    llm.update_params(other, mode="keep")
    late = llm.add_request(*BOTH[0])
    found = [o.outputs[0] for o in ended(llm, [*ids, late])]
    version = llm.engine.weights_version
    for (prompt, params), old, new in zip(BOTH, before, found[:2], strict=True):
        (_, first), (at, second) = new.weights or []
        assert 0 < at < 24 and (first, second) == (version - 1, version)
        assert new.token_ids[:at] == old.token_ids[:at] and new.logprobs[:at] == old.logprobs[:at]
        rest = continued(llm, prompt, params, new.token_ids[:at]).outputs[0]
        assert rest.token_ids == new.token_ids != old.token_ids
        assert rest.logprobs[at:] == new.logprobs[at:]
    assert found[2].weights == [(0, version)]
    assert found[2].token_ids == llm.generate(*BOTH[0], use_tqdm=False)[0].outputs[0].token_ids
    assert llm.report()["compilations"] == compiled


def test_requests_may_end_before_or_be_aborted(llm, other, tiny, restored):
    whole = [llm.generate(*request, use_tqdm=False)[0].outputs[0].token_ids for request in BOTH]
    ids = begun(llm)
    llm.update_params(other, mode="wait")
    assert [o.outputs[0].token_ids for o in ended(llm, ids)] == whole
    llm.update_params(tiny.params)
    ids = begun(llm)
    wrong = replace(other, embed=other.embed[:-1])
    for refused in (lambda: llm.update_params(wrong, mode="abort"), lambda: llm.update_params(other)):
        with pytest.raises((ValueError, RuntimeError), match="expected|requests are unfinished"):
            refused()
    with pytest.raises(ValueError, match="mode='later' is not allowed"):
        llm.update_params(other, mode="later")
    llm.step()
    llm.update_params(other, mode="abort")
    for output, old in zip(ended(llm, ids), whole, strict=True):
        (one,) = output.outputs
        assert one.finish_reason == "abort" and 0 < len(one.token_ids) < 24
        assert one.token_ids == old[: len(one.token_ids)] and len(one.weights) == 1


def test_weights_that_arrive_during_prefill_compute_the_whole_prompt(llm, other, restored):
    ids = [llm.add_request(PROMPTS[3], replace(GREEDY, prompt_logprobs=0))]
    llm.engine.step()  # 64 of 80 tokens
    llm.update_params(other, mode="keep")
    (found,) = ended(llm, ids)
    (want,) = llm.generate(PROMPTS[3], replace(GREEDY, prompt_logprobs=0), use_tqdm=False)
    assert found.outputs[0].token_ids == want.outputs[0].token_ids and len(found.outputs[0].weights) == 1
    assert found.prompt_logprobs == want.prompt_logprobs


def test_a_pause_keeps_running_requests(llm, other, tiny, restored):
    whole = [llm.generate(*request, use_tqdm=False)[0] for request in BOTH]
    for clear_cache in (True, False):
        ids = begun(llm)
        llm.pause_generation(mode="keep", clear_cache=clear_cache)
        assert llm.is_sleeping()
        with pytest.raises(RuntimeError, match="sleeps, without scheduling"):
            llm.step()
        llm.resume_generation()
        assert exact(ended(llm, ids)) == exact(whole)
    ids = begun(llm)
    llm.pause_generation(mode="keep")
    llm.update_params(other)
    llm.update_params(tiny.params)
    llm.resume_generation()
    assert exact(ended(llm, ids)) == exact(whole)
    with pytest.raises(ValueError, match="mode='never' is not allowed"):
        llm.pause_generation(mode="never")


@pytest.mark.parametrize("mode", [None, "abort", "wait", "keep"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(llm, tiny, mode, value):
    """Those that are served stay."""
    before, version = llm.generate(*BOTH[0], use_tqdm=False), llm.engine.weights_version
    flat = {path: x.at[(0,) * x.ndim].set(value) for path, x in leaves_by_path(tiny.params).items()}
    for path in ("embed", "layers.1.ffn.down", "norm.gain"):
        leaves = [flat[path] if name == path else x for name, x in leaves_by_path(tiny.params).items()]
        wrong = jax.tree.unflatten(jax.tree.structure(tiny.params), leaves)
        with pytest.raises(ValueError, match=f"parameter {path} holds NaN or infinity"):
            llm.update_params(wrong, mode)
        with pytest.raises(ValueError, match=f"parameter {path} holds NaN or infinity"):
            LLM.from_params(tiny.config, wrong)
    assert llm.engine.weights_version == version
    assert exact(llm.generate(*BOTH[0], use_tqdm=False)) == exact(before)


def test_weights_of_a_folder(llm, other, tiny, tmp_path, restored):
    huggingface.save_hf(tmp_path / "new", tiny.config, other, "float32")
    before = llm.engine.weights_version
    assert llm.load_params(tmp_path / "new") == before + 1
    loaded = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.update_params(other)
    assert exact(loaded) == exact(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    bigger = replace(tiny.config, max_position=tiny.config.max_position * 2)
    huggingface.save_hf(tmp_path / "bigger", bigger, other, "float32")
    with pytest.raises(ValueError, match="bigger is of another model"):
        llm.load_params(tmp_path / "bigger")


LOADED_BY_SIX = """
import re, sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
import jax
from duetto.serve.engine.startup.model_folder import read_model
from duetto.serve.engine.startup.model_source import ModelSource
from duetto.serve.host.process import keep_freed_memory
from duetto.serve.llm import weights
from duetto.serve.options.engine import EngineOptions

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

keep_freed_memory()
source = ModelSource.resolve_names(sys.argv[1])
config, params = read_model(source.model_folder, "float32", jax.devices()[0])
engine = SimpleNamespace(params=params, weights_version=1)
weights.update_params = lambda session, options, params, mode: setattr(engine, "params", params)
session, sizes = SimpleNamespace(engine=engine, hold_engine=nullcontext), []
threads = [ThreadPoolExecutor(1) for _ in range(6)]
for turn in range(18):
    loading = threads[turn % 6].submit(weights.load_params, session, EngineOptions(), config, source, None)
    assert loading.result() == 1
    sizes.append(resident())
print(sizes[-1] - sizes[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_that_many_threads_load_take_the_memory_of_one():
    """A server loads each in another thread, and glibc keeps what a thread has freed for that thread."""
    command = [sys.executable, "-c", LOADED_BY_SIX, str(DEMO_FOLDER)]
    grown = int(subprocess.run(command, check=True, timeout=600, capture_output=True, text=True).stdout)
    size = (
        sum(x.nbytes for x in jax.tree.leaves(read_model(DEMO_FOLDER, "float32", jax.devices()[0])[1])) >> 20
    )
    assert grown < 3 * size, f"{grown} MiB more after 17 loads of {size} MiB"


def test_given_tokens_have_the_bits_of_sampled_ones(llm):
    """By decode always; by prefill where the two are of one class."""
    prompts = [IDS, PROMPTS[1], PROMPTS[3]]
    params = [replace(LONG, logprobs=0), replace(GREEDY, logprobs=0, max_tokens=20), replace(LONG, seed=1)]
    sampled = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
    tokens = [o.token_ids for o in sampled]
    wanted = [[at[t].logprob for t, at in zip(o.token_ids, o.logprobs, strict=True)] for o in sampled]
    found = llm.log_likelihood(prompts, tokens, by="decode")
    assert [(o.token_ids, o.logprobs) for o in found] == list(zip(tokens, wanted, strict=True))
    read = [o.logprobs for o in llm.log_likelihood(prompts, tokens)]
    assert (read == wanted) == llm.engine.classes.same_bits
    np.testing.assert_allclose(np.concatenate(read), np.concatenate(wanted), atol=1e-4)
    empty, one = llm.log_likelihood(prompts[:2], [[], [4]], by="decode")
    assert not empty.logprobs and one.token_ids == [4] and len(one.logprobs) == 1
    with pytest.raises(
        ValueError, match="a continuation has 600 tokens, behind its prompt there is room for"
    ):
        llm.log_likelihood(IDS, [4] * 600, by="decode")


def test_weights_that_are_written_are_read_again(llm, other, tiny, tmp_path, restored):
    with pytest.raises(ValueError, match="save_params: the model was not read from a folder"):
        llm.save_params(tmp_path / "none")
    with pytest.raises(ValueError, match="load_params: path is missing"):
        llm.load_params()
    huggingface.save_hf(tmp_path / "first", tiny.config, tiny.params, "float32")
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "page_size": 16, "max_prefill_tokens": 64}
    with LLM(tmp_path / "first", load_format="dummy", dtype="float32", **sizes) as served:
        assert served.load_params() == 1  # though it has begun with random ones
        assert exact(served.generate(PROMPTS, GREEDY, use_tqdm=False)) == exact(
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        )
        served.update_params(other)
        served.save_params(tmp_path / "second")
        with pytest.raises(ValueError, match="second: exists already"):
            served.save_params(tmp_path / "second")
    with LLM(tmp_path / "second", load_format="sharded_state", dtype="float32", **sizes) as served:
        llm.update_params(other)
        assert exact(served.generate(PROMPTS, GREEDY, use_tqdm=False)) == exact(
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        )
