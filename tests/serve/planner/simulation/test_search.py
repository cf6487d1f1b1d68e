"""The search for an engine that bears a workload: what fits, what is estimated, and what the simulation says
of it."""

from dataclasses import replace
from itertools import count

import jax
import jax.numpy as jnp
import pytest
from cases.models import TINY

from duetto.model.pair import PairConfig
from duetto.model.sharding import Layout
from duetto.serve.engine.startup.mesh import on_one, put
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.targets import TargetError, known_target
from duetto.serve.planner.simulation.candidates import Space, layouts
from duetto.serve.planner.simulation.estimate import estimate, prefill_seconds
from duetto.serve.planner.simulation.fitting import PlannedModel, fit, stage_bytes
from duetto.serve.planner.simulation.search import CandidateResult, SearchGoal, bear, search, served, without
from duetto.serve.planner.simulation.times import STATED
from duetto.serve.planner.workloads.tally import SLO
from duetto.serve.planner.workloads.traces import TraceEntry, drawn
from duetto.serve.planner.workloads.workload import Workload
from duetto.serve.runtime.compiled.sizing import choose_sizes

BASE = EngineOptions(max_model_len=512, max_num_seqs=16, max_prefill_tokens=512)
LOAD = Workload(
    [replace(e, prompt=min(e.prompt, 400), output=min(e.output, 60)) for e in drawn(130, 8.0, 150, 15)]
)
AIM = SearchGoal(SLO(0.05, 0.005), share=0.95)


def job(shape: str | None = None, target: str = "h200") -> PlannedModel:
    config = PRESETS[shape] if shape else TINY
    return PlannedModel(shape or "tiny", config, known_target(target))


def test_targets_are_known_without_their_compilers():
    assert (known_target("8xh200").count, known_target("8xh200").platform) == (8, "gpu")
    assert (known_target("v6e:2x4").count, known_target("v6e").count) == (8, 1)
    assert (known_target("tpu7x:2x2x1").count, known_target("tpu7x").count) == (8, 1)
    with pytest.raises(TargetError, match="target 'a10' is unknown"):
        known_target("a10")


def test_an_engine_on_one_device_has_the_sizes_of_a_start():
    own, options = job("0.6b", "v5e"), replace(BASE, max_model_len=8192, max_num_seqs=256)
    params = own.params(None)
    placed = put(on_one(own.config, jax.devices()[0]), params)
    memory = own.target.memory
    assert fit(own, options, params).sizes == choose_sizes(PairConfig(own.config), options, placed, memory)


def test_layouts_split_the_weights():
    own = job("0.6b", "8xh200")
    params = own.params(None)
    (whole,) = stage_bytes(own, Layout(), params)
    (half,) = stage_bytes(own, Layout(2), params)
    four = stage_bytes(own, Layout(1, stages=4), params)
    assert half == pytest.approx(whole / 2, rel=0.01)
    assert whole < sum(four) < 1.3 * whole  # the head is a copy of the embedding
    mixture = job("30b-a3b", "8xh200")
    weights = mixture.params(None)
    (dealt,) = stage_bytes(mixture, Layout(1, True, data=8), weights)
    (alone,) = stage_bytes(mixture, Layout(), weights)
    assert alone / 8 < dealt < alone / 5  # all but the experts are whole


def test_what_does_not_fit_says_why():
    with pytest.raises(ValueError, match=r"does not fit v5e in any layout: TP1 PP1 DP1: 15.0 GiB of weights"):
        search(Space(job("8b", "v5e"), BASE, STATED), LOAD, AIM)


def test_every_way_to_spread_a_model_is_tried():
    dense = list(layouts(PRESETS["8b"], 4))
    assert len(dense) == 6 and not any("data_parallel_size" in layout for layout in dense)
    assert {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True} in list(
        layouts(PRESETS["30b-a3b"], 4)
    )


def test_the_estimate_is_near_what_the_simulation_bears():
    space = Space(job(), BASE, STATED)
    own = space.candidate()
    assert own is not None
    aim = SearchGoal(SLO(0.05, 0.01), share=0.95)
    answer = CandidateResult(own, estimate(own, LOAD, aim.within))
    bear(answer, LOAD, aim, answer.steady.rate, until=1.0, clock=lambda: 0.0)
    best = answer.borne(aim.share)
    assert best is not None and best.rate == pytest.approx(answer.steady.rate, rel=0.6)


def test_a_search_without_time_still_simulates_the_best():
    ticks = count()
    found = search(Space(job(), BASE, STATED), LOAD, replace(AIM, seconds=0.5), lambda: next(ticks))
    assert [len(answer.points) for answer in found].count(1) == 1
    assert len({answer.candidate.name for answer in found}) == len(found)


def test_an_accelerator_is_planned_without_the_kernels_of_a_cpu():
    plain, asked = (Space(job(), replace(BASE, cpu_kernels=value), STATED).made() for value in (None, True))
    assert estimate(asked, LOAD, AIM.within) == estimate(plain, LOAD, AIM.within)
    assert (asked.name, asked.shapes) == (plain.name, plain.shapes)


def test_limits_cost_and_replicas_are_counted():
    own = Space(job(), BASE, STATED).candidate()
    assert own is not None
    answer = CandidateResult(own, estimate(own, LOAD, AIM.within))
    bear(answer, LOAD, AIM, answer.steady.rate / 3, until=1.0, clock=lambda: 0.0)
    best = answer.borne(AIM.share)
    assert best is not None
    more = without(answer, LOAD, AIM, until=1.0, clock=lambda: 0.0)
    assert set(more) == {"ttft", "tpot"} and max(more.values()) >= best.rate
    at = served(answer, LOAD.faster(3 * best.rate / LOAD.rate * 0.99), AIM)
    assert at is not None and at[0] == 3 and at[1].rate == pytest.approx(3 * 0.99 * best.rate)


def test_a_workload_is_repeated_with_blocks_of_its_own():
    load = Workload([TraceEntry(0.0, 600, 2, (0, 1)), TraceEntry(1.0, 600, 2, (0, 2))])
    more = load.repeated(5)
    assert [e.arrival for e in more.entries] == [0, 1, 2, 3, 4]
    assert [e.blocks for e in more.entries[:4]] == [(0, 1), (0, 2), (3, 4), (3, 5)]
    assert load.shared == pytest.approx(512 / 1200) and 0.3 < more.shared < load.shared
    assert load.rate == 1.0 and load.context == 601.0


def test_precisions_are_considered_where_that_is_allowed():
    space = Space(job(), BASE, STATED, quantised=True)
    assert [c.options.quantization for c in space.layouts()] == [None, "fp8", "fp8"]
    assert jnp.dtype(space.job.dtype) == jnp.bfloat16


def test_requests_in_any_order_begin_at_0():
    load = Workload.of([TraceEntry(-3.0, 5, 1), TraceEntry(-5.0, 6, 1), TraceEntry(1e9, 7, 1)])
    assert [(e.arrival, e.prompt) for e in load.entries] == [(0.0, 6), (2.0, 5), (1e9 + 5, 7)]


def test_prompts_are_estimated_whole_where_nothing_is_found_again():
    load = Workload([TraceEntry(float(i), 2000, 5, (0, 1, 2, 3)) for i in range(8)])
    kept, lost = (
        Space(job(), replace(BASE, enable_prefix_caching=caching), STATED).made() for caching in (True, False)
    )
    assert prefill_seconds(lost, load, 0.95).mean > prefill_seconds(kept, load, 0.95).mean
    assert prefill_seconds(lost, load, 0.95) == prefill_seconds(
        kept, Workload([replace(e, blocks=()) for e in load.entries]), 0.95
    )


def test_pages_in_the_hosts_memory_are_not_simulated_with_prompts_computed_apart():
    bare, kept = (Space(job(target="2xh200"), replace(BASE, swap_space=gib), STATED).made() for gib in (0, 1))
    assert [own.apart for own in bare.splits()] == [1] and not list(kept.splits())


def test_only_what_is_not_given_is_varied_and_only_layouts_that_do_not_fit_are_refused():
    base = replace(BASE, pipeline_parallel_size=2)
    space = Space(
        job(target="4xh200"), base, STATED, fixed=frozenset({"pipeline_parallel_size", "page_size"})
    )
    found = list(space.layouts())
    assert found and all(own.options.pipeline_parallel_size == 2 for own in found)
    assert "page size" not in {name for name, _ in space.variations(found[0])}
    assert space.candidate(micro_batches=3 * BASE.seats) is None
    assert not {f"TP{own.options.tensor_parallel_size} PP2 DP1" for own in found} & space.refused.keys()
