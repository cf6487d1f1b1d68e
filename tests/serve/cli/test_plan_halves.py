"""What `duetto plan` says of feed-forward layers that lie apart."""

import json

import pytest
from cases.targets import found_target

from duetto.serve.cli.main import main
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.targets import GPUS

pytestmark = pytest.mark.extras  # a plan for a device that is not here needs its compiler
PLAN = ["plan", "--shape", "30b-a3b", "--target", "2xh200", "--experimental-ffn-devices", "1"]


@pytest.fixture
def found(capsys):
    found_target("2xh200")
    main([*PLAN, "--json"])
    return json.loads(capsys.readouterr().out)


def test_each_part_has_its_weights_and_one_the_cache(found):
    own, ffn = (part["memory"] for part in found["stages"])
    experts = PRESETS["30b-a3b"].num_layers * 128 * 3 * 2048 * 768 * 2  # bytes
    assert experts <= ffn["weights"] < 1.01 * experts and own["weights"] < 0.1 * experts
    assert ffn["cache"] == ffn["slots"] == 0 < own["cache"]
    assert max(sum(m[k] for k in ("weights", "cache", "slots", "temporaries")) for m in (own, ffn)) < 142.5e9


def test_a_micro_batch_takes_its_turn_in_either_part(found):
    for row in found["micro_batches"]:
        attention, ffn = row["stages"]
        assert row["seconds"] >= row["micro_batches"] * max(attention, ffn) * (1 - 1e-9)
        assert row["seconds"] >= attention + ffn + row["links"] - 1e-9
        least = 128 * 3 * 2048 * 768 * 2 * 48 / GPUS["h200"].bandwidth  # all experts, from memory
        assert ffn > 0.9 * least


def test_the_plan_says_whether_disaggregation_pays(found, capsys):
    main(PLAN)
    apart, together = found["compared"]["apart"]["rate"], found["compared"]["together"]["rate"]
    said = capsys.readouterr().out
    assert ("does not pay here" in said) == (apart < together)
