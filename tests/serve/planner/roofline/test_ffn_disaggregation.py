"""When attention and feed-forward layers apart pay, from published sizes."""

import pytest

from benchmarks import apart
from benchmarks.tuning import filled, table
from duetto.serve.planner.roofline.ffn_disaggregation import Cluster, ModelHalves
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.targets import GPUS

H200 = GPUS["h200"]


@pytest.mark.parametrize(
    "sides, whole, active, keys",
    [(apart.DEEPSEEK_V3, 671, 37, 2.88e8), (apart.step_3(), 316, 38, 2.56e8)],
    ids=["DeepSeek-V3", "Step-3"],
)
def test_sizes_are_those_that_are_published(sides: ModelHalves, whole: int, active: int, keys: float):
    """Parameters in all and of a token, in 10^9, and bytes of 8192 tokens' keys at 8 bits (Step-3's
    table 2)."""
    assert (sides.attention_params + sides.expert_params + sides.dense_params) / 1e9 == pytest.approx(
        whole, rel=0.003
    )
    assert (sides.attention_params + sides.active_params) / 1e9 == pytest.approx(active, rel=0.012)
    assert 8192 * sides.cached_token_bytes == pytest.approx(keys, rel=0.003)


def test_the_page_has_the_table():
    page = apart.PAGE.read_text()
    made = table(apart.HEAD, apart.rows())
    assert filled(page, "apart", made) == page, "run `python -m benchmarks.apart`"


def test_the_ridge_is_where_computing_takes_as_long_as_reading():
    sides = ModelHalves.from_config(PRESETS["30b-a3b"])
    batch = sides.ridge_point(H200)
    fed = sides.ffn_demand(batch, 4, replicates_dense=False)
    assert fed.flops / H200.flops16 == pytest.approx(fed.bytes / H200.bandwidth, rel=1e-3)
    assert batch == pytest.approx(103 * 128 / 8, rel=0.02)  # experts in all over those of a token


def test_disaggregating_dense_layers_pays_where_keys_fill_memory():
    """And not where rows are enough without it, nor where no part holds its weights."""
    dense = ModelHalves.from_config(PRESETS["8b"], param_bytes=2, key_element_bytes=2)

    def gain(devices: int, context: int, kind: str = "h100") -> float:
        cluster = Cluster(GPUS[kind], devices, context)
        both = cluster.best_disaggregated_decode(dense), cluster.best_colocated_decode(dense)
        assert both[0] is not None and both[1] is not None
        assert both[0].rows * context * dense.cached_token_bytes < both[0].attending * GPUS[kind].memory
        return both[0].rate / both[1].rate

    assert gain(32, 32768) > 1 > gain(32, 4096, "h200") > gain(2, 512)
    assert Cluster(H200, 2, 4096).best_disaggregated_decode(apart.DEEPSEEK_V3) is None
    assert Cluster(H200, 2, 4096).best_colocated_decode(apart.DEEPSEEK_V3) is None
