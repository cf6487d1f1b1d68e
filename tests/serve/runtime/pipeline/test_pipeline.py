"""Serving in stages: what stages are made of. `tests/devices` has tests on several devices."""

import threading
import time
from dataclasses import replace

import pytest
from cases.models import ATTENTION, RANDOM

from duetto.model.config import LayerKind
from duetto.serve.engine.startup.stage_shardings import check_separate_ffn
from duetto.serve.options.engine import EngineOptions
from duetto.serve.runtime.pipeline.clock import StageClock
from duetto.serve.runtime.pipeline.pipelined_step import StageThreads
from duetto.serve.runtime.pipeline.split import balance_costs, split_layers


def test_steps_before_a_reset_are_not_timed():
    clock, may = StageClock(1), threading.Event()

    class Slow:
        def is_ready(self) -> bool:
            return False

        def block_until_ready(self) -> None:
            assert may.wait(timeout=600)

    clock.record_run(0, time.perf_counter(), time.perf_counter(), None, Slow())
    clock.reset()
    may.set()
    clock.close()
    assert clock.report() == {"seconds": 0.0, "busy_seconds": [0.0], "bubbles": 0.0}
    assert not any(thread.is_alive() for thread in clock._threads)


def test_no_thread_waits_for_a_later_stage():
    """A job of the first stage is asked for before what it needs of the second: the first goes on with
    others."""
    both, may = StageThreads([range(1), range(1, 2)]), threading.Event()
    late = both.submit(0, lambda x: x + 1, both.submit(1, lambda: may.wait(timeout=600) and 1))
    assert both.submit(0, lambda: 7).wait_result() == 7
    may.set()
    assert late.wait_result() == 2
    one, failed = both.submit_parts(2, 0, lambda: 1 / 0)
    for promise in (one, failed, both.submit(1, lambda x: x, one)):
        with pytest.raises(ZeroDivisionError):
            promise.wait_result()
    both.drain()


def test_stages_work_at_the_same_time():
    """The second stage's step and the first one's next wait for each other: in turn they would wait for
    ever."""
    both, meet = StageThreads([range(1), range(1, 2)]), threading.Barrier(2, timeout=600)

    def first(step: int) -> int:
        if step:
            meet.wait()
        return step

    def second(step: int) -> int:
        if step < 7:
            meet.wait()
        return step

    done = [both.submit(1, second, both.submit(0, first, step)) for step in range(8)]
    assert [promise.wait_result() for promise in done] == list(range(8))


def test_layers_that_read_more_than_the_stream_are_not_cut():
    own, keys = RANDOM["borrowed"], replace(RANDOM["borrowed"], layer_input=None)
    assert split_layers(own, 1) == [range(4)]
    with pytest.raises(ValueError, match="pipeline_parallel_size 2 is not allowed .* inputs of their own"):
        split_layers(own, 2)
    with pytest.raises(ValueError, match="pipeline_parallel_size 2 is not allowed .* the keys of others"):
        split_layers(keys, 2)


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size 2 is not allowed with experimental_ffn_devices 1",
        ),
        ({"decode_steps": 4}, "decode_steps 4 is not allowed with experimental_ffn_devices 1: only 1"),
        ({"swap_space": 1.0}, "swap_space 1.0 is not allowed with experimental_ffn_devices 1"),
        ({"kv_role": "both"}, "kv_role both is not allowed with experimental_ffn_devices 1"),
        ({"micro_batches": 9, "max_num_seqs": 8}, "micro_batches 9 is not allowed with max_num_seqs 8"),
        ({"experimental_ffn_devices": 0}, "experimental_ffn_devices 0 is not allowed: 1 or more"),
        ({"experimental_ffn_devices": 2}, "experimental_ffn_devices 2 is not allowed: 1"),
        ({"speculative_config": {"model": "demo-draft", "num_speculative_tokens": 2}}, "ngram and suffix"),
    ],
)
def test_what_halves_cannot_do_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        EngineOptions(**{"experimental_ffn_devices": 1} | options)


def test_layers_without_two_halves_are_not_cut():
    with pytest.raises(ValueError, match=r"ffn_devices 1 is not allowed .* have inputs of their own"):
        check_separate_ffn(RANDOM["borrowed"], 1)
    with pytest.raises(ValueError, match=r"ffn_devices 1 is not allowed .* have the keys of others"):
        check_separate_ffn(replace(RANDOM["borrowed"], layer_input=None), 1)
    bare = replace(RANDOM["tiny"], layers=(*RANDOM["tiny"].layers, LayerKind(ATTENTION, None)))
    with pytest.raises(ValueError, match=r"ffn_devices 1 is not allowed .* have no feed-forward layer"):
        check_separate_ffn(bare, 1)


@pytest.mark.parametrize(
    "costs, stages, behind, lengths",
    [
        ([1] * 8, 2, 0, [4, 4]),
        ([1] * 8, 2, 2, [5, 3]),
        ([1, 1, 5, 1, 1], 3, 0, [2, 1, 2]),
        ([3, 1, 1, 1], 2, 0, [1, 3]),
        ([1, 1], 2, 100, [1, 1]),
    ],
)
def test_layers_are_cut_where_the_slowest_stage_is_fastest(costs, stages, behind, lengths):
    spans = balance_costs(costs, stages, behind)
    assert [len(span) for span in spans] == lengths
    assert [layer for span in spans for layer in span] == list(range(len(costs)))
