"""An engine in use: requests one step at a time, threads, memory, new weights, and what is compiled."""

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.requests import GREEDY, IDS, PARAMS, PROMPTS, SEEDED, SIZES, SMALLEST, exact, tokens

from duetto import LLM, RequestOutput
from duetto.model.attention import FusedQKV
from duetto.model.tree import has_instance
from duetto.serve.engine.weights.weight_update import make_root_hash
from duetto.serve.kv.offload.realm import hash_params
from duetto.serve.llm.audit.facts import hash_weights

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_requests_one_step_at_a_time(llm, expected):
    ids = [
        llm.add_request(p, s, request_id=f"r{i}")
        for i, (p, s) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    with pytest.raises(ValueError, match="'r0' is in use"):
        llm.add_request(IDS, GREEDY, request_id="r0")
    other = llm.generate(
        IDS, GREEDY, use_tqdm=False
    )  # drives the queued ones along and leaves their results alone
    found: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        found |= {output.request_id: output for output in llm.step()}
    assert exact([found[i] for i in ids]) == expected
    assert tokens(other) == [expected[0][0]]


def test_an_id_of_the_users_does_not_collide(llm):
    last = int(llm.generate(IDS, GREEDY, use_tqdm=False)[0].request_id)
    taken = [str(last + 1), str(last + 2)]
    for id in taken:
        llm.add_request(IDS, GREEDY, request_id=id)
    assert llm.add_request(IDS, GREEDY) not in taken
    done = [output.request_id for _ in range(40) for output in llm.step()]
    assert set(taken) < set(done) and len(done) == 3


def test_abort(llm):
    (whole,) = tokens(llm.generate(IDS, replace(GREEDY, max_tokens=50), use_tqdm=False))
    kept = llm.add_request(IDS, GREEDY)
    ended = llm.add_request(IDS, replace(GREEDY, max_tokens=50))
    unborn = llm.add_request(IDS, GREEDY)
    llm.abort(unborn)
    for _ in range(3):
        assert {o.request_id for o in llm.step()} <= {unborn}
    llm.abort(ended)
    llm.abort("nobody")
    found = {}
    while llm.has_unfinished_requests():
        found |= {o.request_id: o.outputs[0] for o in llm.step()}
    assert found[ended].finish_reason == "abort" and found[kept].finish_reason == "length"
    assert 0 < len(found[ended].token_ids) < 50
    assert found[ended].token_ids == whole[: len(found[ended].token_ids)]
    assert found[kept].token_ids == whole[:10]


def test_threads_share_an_engine(llm, expected):
    def run(order: list[int]) -> list[list[tuple]]:
        rounds = [
            llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order], use_tqdm=False)
            for _ in range(3)
        ]
        rounds += [[llm.generate(PROMPTS[i], PARAMS[i], use_tqdm=False)[0] for i in order]]
        return [exact(outputs) for outputs in rounds]

    def stream() -> list[list[int]]:
        return [[t for piece in llm.stream(IDS, SEEDED) for t in piece.token_ids] for _ in range(6)]

    (want,) = tokens(llm.generate(IDS, SEEDED, use_tqdm=False))
    with ThreadPoolExecutor(3) as pool:
        one, two, streamed = (
            pool.submit(run, [0, 1, 2, 3]),
            pool.submit(run, [3, 1, 0, 2]),
            pool.submit(stream),
        )
        assert all(found == expected for found in one.result())
        assert all(found == [expected[i] for i in (3, 1, 0, 2)] for found in two.result())
        assert streamed.result() == [want] * 6


def live_bytes() -> int:
    gc.collect()
    gc.freeze()  # the next collection looks at what is new
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.parametrize("end", ["close", "del"])
def test_closing_an_engine_frees_its_memory(start, end):
    before = live_bytes()
    llm = start()
    llm.generate(IDS, GREEDY, use_tqdm=False)
    assert live_bytes() >= before + sum(x.nbytes for x in jax.tree.leaves(llm.engine._arguments.cache))
    if end == "close":
        llm.close()
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate(IDS, GREEDY)
        with pytest.raises(RuntimeError, match="closed"):
            llm.step()
    else:
        del llm
    assert live_bytes() == before


def test_closing_an_engine_ends_running_requests(start):
    llm = start()
    llm.add_request(IDS, GREEDY)
    stream = llm.stream(IDS, replace(GREEDY, max_tokens=100))
    next(stream)
    llm.close()
    assert not llm.has_unfinished_requests()
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


def test_update_params(llm, start, tiny):
    other = jax.tree.map(lambda x: jnp.flip(x, 0), tiny.params)
    old = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with LLM.from_params(tiny.config, other, **SIZES) as fresh:
        wanted = fresh.generate(PROMPTS, PARAMS, use_tqdm=False)
    compiled = llm.report()["compilations"]
    try:
        llm.update_params(other)
        new = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert all(a is b for a, b in zip(jax.tree.leaves(llm.params), jax.tree.leaves(other), strict=True))
    finally:
        llm.update_params(tiny.params)
    assert exact(new) == exact(wanted) != exact(old)
    assert [o.num_cached_tokens for o in new] == [0] * 4
    assert llm.report()["compilations"] == compiled


@pytest.mark.full
@pytest.mark.usefixtures("few_shapes")
def test_fused_projections_change_no_token_and_take_new_weights(monkeypatch):
    """As on one GPU; without the kernels and the layout of a CPU."""
    options = {**SIZES, "model": SMALLEST, "dtype": "float32", "cpu_kernels": False}

    def answers(llm: LLM) -> list[list[int]]:
        return tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))

    with LLM(**options) as apart:
        wanted, hashes = answers(apart), (hash_weights(apart.engine.params), hash_params(apart.engine.params))
        names = make_root_hash(apart.config, apart.engine.all_params, "auto")
        params = jax.tree.map(lambda x: jnp.flip(x, 0), apart.params)
        monkeypatch.setattr("duetto.model.weights.device_forms.is_on_one_gpu", lambda params: True)
        with LLM(**options) as one:
            served = one.engine.params
            assert has_instance(served, FusedQKV) and not has_instance(apart.engine.params, FusedQKV)
            assert (hash_weights(served), hash_params(served)) == hashes
            # they hand each other pages
            assert make_root_hash(one.config, one.engine.all_params, "auto") == names
            assert answers(one) == wanted
            one.update_params(params)
            assert answers(one) != wanted
            one.load_params()
            assert answers(one) == wanted
            jax.tree.map(np.testing.assert_array_equal, one.params, apart.params)
    with LLM(**options, enable_lora=True) as adapting:
        assert not has_instance(adapting.engine.params, FusedQKV)


def test_update_params_is_refused(llm, tiny):
    id = llm.add_request(IDS, GREEDY)
    llm.step()
    with pytest.raises(RuntimeError, match="unfinished"):
        llm.update_params(tiny.params)
    llm.abort(id)
    llm.step()
    llm.update_params(tiny.params)
    shorter = replace(tiny.params, embed=tiny.params.embed[:-1])
    with pytest.raises(ValueError, match=r"embed is float32\[299, ?48\], expected float32\[300, ?48\]"):
        llm.update_params(shorter)
    whole = replace(tiny.params, embed=tiny.params.embed.astype(int))
    with pytest.raises(ValueError, match=r"embed is int32\[300, ?48\], expected float32\[300, ?48\]"):
        llm.update_params(whole)
    stop = tokens(llm.generate(IDS, GREEDY, use_tqdm=False))[0][2]
    llm.generate(IDS, replace(GREEDY, stop_token_ids=[stop]), use_tqdm=False)
    llm.update_params(tiny.params)  # allowed at once, though a step may be in flight behind a stop token


def test_compilations_are_counted(llm):
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    before = llm.report()["compilations"]
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.report()["compilations"] == before
    jax.jit(lambda x: x * 3 + 0.125)(jnp.ones(7)).block_until_ready()
    assert llm.report()["compilations"] > before


def test_without_the_contract_greedy_tokens_agree(start, llm):
    prompts = [[i, i + 1, 2 * i] for i in range(3, 9)]
    want = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
    with start(reproducible=False) as fast:
        assert tokens(fast.generate(prompts, GREEDY, use_tqdm=False)) == want
        assert tokens(fast.generate(prompts[0], GREEDY, use_tqdm=False)) == want[:1]
        assert any(step.startswith("decode[1,") for step in fast.report()["steps"])
