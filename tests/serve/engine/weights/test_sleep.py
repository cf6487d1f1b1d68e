"""An engine that gives its memory back for a while, forgets its cache, and goes on with the same tokens."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest
from cases.requests import SIZES

from duetto import LLM, RequestOutput, SamplingParams
from duetto.serve.engine.core import compile_planner, engine
from duetto.serve.engine.weights import sleep

PARAMS = SamplingParams(temperature=0.9, seed=7, max_tokens=10, logprobs=2)
PROMPTS = [[5, 17, 200, 31, 8], list(range(20, 60)), [7]]


@pytest.fixture(scope="module")
def llm(tiny) -> Iterator[LLM]:
    own = jax.tree.map(lambda x: x + 0, tiny.params)  # nobody else holds them
    with LLM.from_params(tiny.config, own, **SIZES) as llm:
        del own
        jax.block_until_ready(llm.params)  # a CPU's kernels unpack them by programs, which compile once
        yield llm


@pytest.fixture(scope="module")
def expected(llm) -> list[tuple]:
    return exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture(autouse=True)
def awake(llm, expected):
    """Every test leaves an engine that is awake and idle, and gives the same bits without a compilation."""
    compiled = llm.report()["compilations"]
    yield
    assert not llm.is_sleeping() and not llm.has_unfinished_requests() and not llm.session.subscriptions
    assert exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert llm.report()["compilations"] == compiled
    assert llm.engine.tables.occupancy == 0


def exact(outputs: list[RequestOutput]) -> list[tuple]:
    """Tokens and the bits of their log-probabilities."""
    return [
        (o.outputs[0].token_ids, [[x.logprob for x in at.values()] for at in o.outputs[0].logprobs or []])
        for o in outputs
    ]


def device_bytes() -> int:
    gc.collect()
    gc.freeze()  # the next collection looks at what is new
    return sum(x.nbytes for x in jax.live_arrays())


def bytes_of(tree: object) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_reset_prefix_cache(llm):
    assert llm.generate(PROMPTS[1], PARAMS, use_tqdm=False)[0].num_cached_tokens == 32
    assert llm.reset_prefix_cache() is True
    assert llm.generate(PROMPTS[1], PARAMS, use_tqdm=False)[0].num_cached_tokens == 0
    llm.add_request(PROMPTS[1], PARAMS)
    llm.step()
    assert llm.reset_prefix_cache() is False
    assert llm.generate(PROMPTS[1], PARAMS, use_tqdm=False)[0].num_cached_tokens == 32
    assert len(llm.wait_for_completion(use_tqdm=False)) == 1


def test_running_requests_are_computed_again_after_a_reset(llm, expected):
    ids = llm.enqueue(PROMPTS, PARAMS)
    for _ in range(4):
        llm.step()
    before = llm.report()["preemptions"]
    assert llm.reset_prefix_cache(reset_running_requests=True) is True
    assert llm.report()["preemptions"] == before + 3
    done = llm.wait_for_completion(use_tqdm=False)
    assert [o.request_id for o in done] == ids and exact(done) == expected


def test_level_1_keeps_the_parameters_on_the_host(llm):
    held, cache, params = device_bytes(), bytes_of(llm.engine.cache), bytes_of(llm.params)
    llm.sleep()
    assert llm.is_sleeping()
    assert device_bytes() <= held - cache  # on a CPU the parameters are on the host as they are
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves((llm.params, llm.engine.cache)))
    for call in (lambda: llm.generate(PROMPTS, PARAMS, use_tqdm=False), lambda: next(llm.stream(PROMPTS[0]))):
        with pytest.raises(
            RuntimeError, match="sleeps, without kv_cache and scheduling and weights: call wake_up"
        ):
            call()
    llm.sleep()  # twice is once
    llm.wake_up()
    assert bytes_of(llm.params) == params


def test_the_cache_may_come_back_later_than_the_weights(llm):
    llm.sleep()
    llm.wake_up(["weights"])
    assert llm.is_sleeping() and isinstance(llm.params.embed, jax.Array)
    with pytest.raises(RuntimeError, match="without kv_cache"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.sleep()
    llm.wake_up(["kv_cache"])
    llm.wake_up(["weights"])


def test_level_2_discards_the_parameters(llm):
    old = jax.tree.map(np.array, llm.params)
    held, gone = device_bytes(), bytes_of(llm.engine.cache) + bytes_of(llm.params)
    llm.sleep(level=2)
    assert device_bytes() <= held - gone
    llm.wake_up()
    with pytest.raises(RuntimeError, match="discarded the parameters: give others with update_params"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    other = old.layers[0].attention.q  # of a shape whose numbers have been looked at, without a compilation
    shape = ", ?".join(map(str, other.shape))
    with pytest.raises(ValueError, match=rf"embed is float32\[{shape}\], expected float32\[300, ?48\]"):
        llm.update_params(replace(jax.device_put(old), embed=jax.device_put(other)))
    llm.update_params(jax.device_put(old))


def test_new_parameters_may_come_while_it_sleeps(llm):
    old = jax.tree.map(np.array, llm.params)
    for tags in (None, ["kv_cache", "weights"]):
        llm.sleep(level=2)
        llm.update_params(jax.device_put(old))
        llm.wake_up(tags)
    llm.sleep(level=1)
    llm.sleep(level=2)
    llm.wake_up(["weights"])
    llm.update_params(jax.device_put(old))
    llm.wake_up(["kv_cache"])


def test_later_weights_use_huge_pages_too(llm, monkeypatch: pytest.MonkeyPatch):
    old, moved = jax.tree.map(np.array, llm.params), list[object]()
    for module in (engine, sleep):
        monkeypatch.setattr(module, "use_huge_pages", moved.append)
    llm.update_params(jax.device_put(old))
    llm.sleep(level=1)
    llm.wake_up()
    assert [bytes_of(tree) for tree in moved] == 2 * [bytes_of(llm.engine.all_params)]


def test_level_0_only_pauses(llm, expected):
    llm.sleep(level=0)
    ids = llm.enqueue(PROMPTS, PARAMS)
    with pytest.raises(RuntimeError, match="sleeps, without scheduling"):
        llm.wait_for_completion(use_tqdm=False)
    llm.wake_up(["scheduling"])
    done = llm.wait_for_completion(use_tqdm=False)
    assert [o.request_id for o in done] == ids and exact(done) == expected


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_unfinished_requests(llm, expected, mode):
    llm.enqueue(PROMPTS, PARAMS)
    for _ in range(4):
        llm.step()
    llm.sleep(mode=mode)
    llm.wake_up()
    done = llm.wait_for_completion(use_tqdm=False)
    if mode == "abort":
        assert {o.outputs[0].finish_reason for o in done} == {"abort"}
        assert all(
            o.outputs[0].token_ids == w[0][: len(o.outputs[0].token_ids)]
            for o, w in zip(done, expected, strict=True)
        )
    else:
        assert exact(done) == expected


def test_what_is_refused(llm):
    for arguments in ({"level": 3}, {"mode": "now"}):
        with pytest.raises(ValueError, match="is not allowed"):
            llm.sleep(**arguments)
    with pytest.raises(ValueError, match="tags \\['cache'\\] are not allowed"):
        llm.wake_up(["cache"])
    llm.wake_up()  # of an engine that is awake


@pytest.mark.usefixtures("early")
def test_no_programs_are_compared_while_there_are_no_parameters(tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compile_planner, "IDLE_SECONDS", 1e6)  # or all are compared before it sleeps
    own = jax.tree.map(np.array, tiny.params)
    with LLM.from_params(tiny.config, jax.device_put(own), **SIZES) as llm:
        llm.sleep(level=2)
        llm.wake_up()
        assert llm.engine.warmup is not None
        with monkeypatch.context() as patch:
            patch.setattr(type(llm.engine.warmup), "has_work", True)
            assert not llm.engine.advance_warmup_if_idle()
        llm.update_params(jax.device_put(own))
        assert llm.generate(PROMPTS, PARAMS, use_tqdm=False)
