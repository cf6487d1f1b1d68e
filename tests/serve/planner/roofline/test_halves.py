"""When attention and feed-forward layers apart pay, from published sizes."""

import pytest

from benchmarks import apart
from benchmarks.tuning import filled, table
from duetto.serve.planner.roofline.halves import Cluster, Sides
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.targets import GPUS

H200 = GPUS["h200"]


@pytest.mark.parametrize(
    "sides, whole, active, keys",
    [(apart.DEEPSEEK_V3, 671, 37, 2.88e8), (apart.step_3(), 316, 38, 2.56e8)],
    ids=["DeepSeek-V3", "Step-3"],
)
def test_sizes_are_those_that_are_published(sides: Sides, whole: int, active: int, keys: float):
    """Parameters in all and of a token, in 10^9, and bytes of 8192 tokens' keys at 8 bits (Step-3's
    table 2)."""
    assert (sides.attention + sides.experts + sides.rest) / 1e9 == pytest.approx(whole, rel=0.003)
    assert (sides.attention + sides.active) / 1e9 == pytest.approx(active, rel=0.012)
    assert 8192 * sides.key_bytes == pytest.approx(keys, rel=0.003)


def test_the_page_has_the_table():
    page = apart.PAGE.read_text()
    made = table(apart.HEAD, apart.rows())
    assert filled(page, "apart", made) == page, "run `python -m benchmarks.apart`"


def test_the_ridge_is_where_computing_takes_as_long_as_reading():
    sides = Sides.of(PRESETS["30b-a3b"])
    batch = sides.ridge(H200)
    fed = sides.feed(batch, 4, at_home=False)
    assert fed.flops / H200.flops16 == pytest.approx(fed.bytes / H200.bandwidth, rel=1e-3)
    assert batch == pytest.approx(103 * 128 / 8, rel=0.02)  # experts in all over those of a token


def test_dense_layers_are_apart_where_keys_fill_the_memory():
    """And not where rows are enough without it, nor where no part holds its weights."""
    dense = Sides.of(PRESETS["8b"], weight=2, key=2)

    def gain(devices: int, context: int, kind: str = "h100") -> float:
        cluster = Cluster(GPUS[kind], devices, context)
        both = cluster.apart(dense), cluster.together(dense)
        assert both[0] is not None and both[1] is not None
        assert both[0].rows * context * dense.key_bytes < both[0].attending * GPUS[kind].memory
        return both[0].rate / both[1].rate

    assert gain(32, 32768) > 1 > gain(32, 4096, "h200") > gain(2, 512)
    assert Cluster(H200, 2, 4096).apart(apart.DEEPSEEK_V3) is None
    assert Cluster(H200, 2, 4096).together(apart.DEEPSEEK_V3) is None
