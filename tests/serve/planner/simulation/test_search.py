"""The search for an engine that bears a workload: what fits, what is estimated, and what the simulation says
of it."""

from dataclasses import replace
from itertools import count

import jax
import jax.numpy as jnp
import pytest
from cases.models import TINY

from duetto.model.draft_pair import PairConfig
from duetto.model.sharding import Layout
from duetto.serve.engine.startup.mesh import place_params, single_device_shardings
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.targets import TargetError, target_facts
from duetto.serve.planner.simulation.candidates import SearchSpace, enumerate_layouts
from duetto.serve.planner.simulation.estimate import estimate_prefill_times, estimate_steady_state
from duetto.serve.planner.simulation.memory_fit import PlannedModel, fit_engine, stage_weight_bytes
from duetto.serve.planner.simulation.search import (
    CandidateResult,
    SearchGoal,
    search_candidates,
    simulate_candidates,
    simulate_until_capacity,
    simulate_without_each_limit,
    size_fleet,
)
from duetto.serve.planner.simulation.step_times import STATED_EFFICIENCY
from duetto.serve.planner.workloads.slo_stats import SLO
from duetto.serve.planner.workloads.traces import TraceEntry, draw_requests
from duetto.serve.planner.workloads.workload import Workload
from duetto.serve.runtime.compiled.sizing import choose_sizes

BASE = EngineOptions(max_model_len=512, max_num_seqs=16, max_prefill_tokens=512)
LOAD = Workload(
    [
        replace(e, prompt_tokens=min(e.prompt_tokens, 400), output_tokens=min(e.output_tokens, 60))
        for e in draw_requests(130, 8.0, 150, 15)
    ]
)
AIM = SearchGoal(SLO(0.05, 0.005), share=0.95)


def job(shape: str | None = None, target: str = "h200") -> PlannedModel:
    config = PRESETS[shape] if shape else TINY
    return PlannedModel(shape or "tiny", config, target_facts(target))


def test_targets_are_known_without_their_compilers():
    assert (target_facts("8xh200").count, target_facts("8xh200").platform) == (8, "gpu")
    assert (target_facts("v6e:2x4").count, target_facts("v6e").count) == (8, 1)
    assert (target_facts("tpu7x:2x2x1").count, target_facts("tpu7x").count) == (8, 1)
    with pytest.raises(TargetError, match="target 'a10' is unknown"):
        target_facts("a10")


def test_planned_sizes_are_those_of_a_start():
    own, options = job("0.6b", "v5e"), replace(BASE, max_model_len=8192, max_num_seqs=256)
    params = own.param_shapes(None)
    placed = place_params(single_device_shardings(own.config, jax.devices()[0]), params)
    memory = own.target.memory
    assert fit_engine(own, options, params).sizes == choose_sizes(
        PairConfig(own.config), options, placed, memory
    )


def test_layouts_split_the_weights():
    own = job("0.6b", "8xh200")
    params = own.param_shapes(None)
    (whole,) = stage_weight_bytes(own, Layout(), params)
    (half,) = stage_weight_bytes(own, Layout(2), params)
    four = stage_weight_bytes(own, Layout(1, stages=4), params)
    assert half == pytest.approx(whole / 2, rel=0.01)
    assert whole < sum(four) < 1.3 * whole  # the head is a copy of the embedding
    mixture = job("30b-a3b", "8xh200")
    weights = mixture.param_shapes(None)
    (dealt,) = stage_weight_bytes(mixture, Layout(1, True, data=8), weights)
    (alone,) = stage_weight_bytes(mixture, Layout(), weights)
    assert alone / 8 < dealt < alone / 5  # all but the experts are whole


def test_what_does_not_fit_says_why():
    with pytest.raises(ValueError, match=r"does not fit v5e in any layout: TP1 PP1 DP1: 15.0 GiB of weights"):
        search_candidates(SearchSpace(job("8b", "v5e"), BASE, STATED_EFFICIENCY), LOAD, AIM)


def test_every_way_to_spread_a_model_is_tried():
    dense = list(enumerate_layouts(PRESETS["8b"], 4))
    assert len(dense) == 6 and not any("data_parallel_size" in layout for layout in dense)
    assert {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True} in list(
        enumerate_layouts(PRESETS["30b-a3b"], 4)
    )


def test_estimated_rates_are_near_the_simulated_ones():
    space = SearchSpace(job(), BASE, STATED_EFFICIENCY)
    own = space.try_candidate()
    assert own is not None
    aim = SearchGoal(SLO(0.05, 0.01), share=0.95)
    answer = CandidateResult(own, estimate_steady_state(own, LOAD, aim.slo))
    simulate_until_capacity(answer, LOAD, aim, answer.steady.rate, deadline=1.0, clock=lambda: 0.0)
    best = answer.best_point(aim.share)
    assert best is not None and best.rate == pytest.approx(answer.steady.rate, rel=0.6)


def test_a_search_without_time_still_simulates_the_best():
    ticks = count()
    found = search_candidates(
        SearchSpace(job(), BASE, STATED_EFFICIENCY), LOAD, replace(AIM, seconds=0.5), lambda: next(ticks)
    )
    assert [len(answer.points) for answer in found].count(1) == 1
    assert len({answer.candidate.name for answer in found}) == len(found)


def test_each_candidate_is_simulated_once_before_one_is_again():
    space = SearchSpace(job(target="2xh200"), BASE, STATED_EFFICIENCY)
    found = [CandidateResult(c, estimate_steady_state(c, LOAD, AIM.slo)) for c in space.layout_candidates()]
    ticks, checks = count(), 2 * len(found) - 1  # before and after each simulation but the first
    simulate_candidates(found, LOAD, AIM, checks, lambda: next(ticks))
    assert len(found) > 1 and all(len(answer.points) == 1 for answer in found)


def test_a_search_of_the_highest_load_can_go_on_later():
    own = SearchSpace(job(), BASE, STATED_EFFICIENCY).try_candidate()
    assert own is not None
    whole, parts = (CandidateResult(own, estimate_steady_state(own, LOAD, AIM.slo)) for _ in range(2))
    simulate_until_capacity(whole, LOAD, AIM, 2 * whole.steady.rate, deadline=1.0, clock=lambda: 0.0)
    for deadline in (-1.0, 1.0):
        simulate_until_capacity(parts, LOAD, AIM, 2 * parts.steady.rate, deadline, clock=lambda: 0.0)
    assert parts == whole and len(whole.points) > 1


def test_an_accelerator_is_planned_without_the_kernels_of_a_cpu():
    plain, asked = (
        SearchSpace(job(), replace(BASE, cpu_kernels=value), STATED_EFFICIENCY).build_candidate()
        for value in (None, True)
    )
    assert estimate_steady_state(asked, LOAD, AIM.slo) == estimate_steady_state(plain, LOAD, AIM.slo)
    assert (asked.name, asked.shapes) == (plain.name, plain.shapes)


def test_limits_cost_and_replicas_are_counted():
    own = SearchSpace(job(), BASE, STATED_EFFICIENCY).try_candidate()
    assert own is not None
    answer = CandidateResult(own, estimate_steady_state(own, LOAD, AIM.slo))
    simulate_until_capacity(answer, LOAD, AIM, answer.steady.rate / 3, deadline=1.0, clock=lambda: 0.0)
    best = answer.best_point(AIM.share)
    assert best is not None
    more = simulate_without_each_limit(answer, LOAD, AIM, deadline=1.0, clock=lambda: 0.0)
    assert set(more) == {"ttft", "tpot"} and max(more.values()) >= best.rate
    at = size_fleet(answer, LOAD.with_speed(3 * best.rate / LOAD.rate * 0.99), AIM)
    assert at is not None and at[0] == 3 and at[1].rate == pytest.approx(3 * 0.99 * best.rate)


def test_a_workload_is_repeated_with_blocks_of_its_own():
    load = Workload([TraceEntry(0.0, 600, 2, (0, 1)), TraceEntry(1.0, 600, 2, (0, 2))])
    more = load.repeat(5)
    assert [e.arrival for e in more.entries] == [0, 1, 2, 3, 4]
    assert [e.blocks for e in more.entries[:4]] == [(0, 1), (0, 2), (3, 4), (3, 5)]
    assert load.shared == pytest.approx(512 / 1200) and 0.3 < more.shared < load.shared
    assert load.rate == 1.0 and load.mean_context == 601.0


def test_precisions_are_considered_where_that_is_allowed():
    space = SearchSpace(job(), BASE, STATED_EFFICIENCY, quantised=True)
    assert [c.options.quantization for c in space.layout_candidates()] == [None, "fp8", "fp8"]
    assert jnp.dtype(space.model.dtype) == jnp.bfloat16


def test_requests_in_any_order_begin_at_0():
    load = Workload.from_entries([TraceEntry(-3.0, 5, 1), TraceEntry(-5.0, 6, 1), TraceEntry(1e9, 7, 1)])
    assert [(e.arrival, e.prompt_tokens) for e in load.entries] == [(0.0, 6), (2.0, 5), (1e9 + 5, 7)]


def test_prompts_are_estimated_whole_where_nothing_is_found_again():
    load = Workload([TraceEntry(float(i), 2000, 5, (0, 1, 2, 3)) for i in range(8)])
    kept, lost = (
        SearchSpace(job(), replace(BASE, enable_prefix_caching=caching), STATED_EFFICIENCY).build_candidate()
        for caching in (True, False)
    )
    assert estimate_prefill_times(lost, load, 0.95).mean > estimate_prefill_times(kept, load, 0.95).mean
    assert estimate_prefill_times(lost, load, 0.95) == estimate_prefill_times(
        kept, Workload([replace(e, blocks=()) for e in load.entries]), 0.95
    )


def test_offload_is_not_simulated_with_disaggregated_prefill():
    bare, kept = (
        SearchSpace(job(target="2xh200"), replace(BASE, swap_space=gib), STATED_EFFICIENCY).build_candidate()
        for gib in (0, 1)
    )
    assert [own.decoders_per_prefill for own in bare.disaggregated_candidates()] == [1] and not list(
        kept.disaggregated_candidates()
    )


def test_only_unset_options_vary_and_only_oversized_layouts_are_refused():
    base = replace(BASE, pipeline_parallel_size=2)
    space = SearchSpace(
        job(target="4xh200"),
        base,
        STATED_EFFICIENCY,
        fixed_options=frozenset({"pipeline_parallel_size", "page_size"}),
    )
    found = list(space.layout_candidates())
    assert found and all(own.options.pipeline_parallel_size == 2 for own in found)
    assert "page size" not in {name for name, _ in space.variations(found[0])}
    assert space.try_candidate(micro_batches=3 * BASE.num_slots) is None
    assert (
        not {f"TP{own.options.tensor_parallel_size} PP2 DP1" for own in found} & space.refused_layouts.keys()
    )
