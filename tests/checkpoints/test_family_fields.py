"""Fields of every family's `config.json`: those that are read are documented, and odd values are refused in
one sentence."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from suite.marks import full_if

from duetto.checkpoints.families import FAMILIES
from duetto.checkpoints.huggingface import check_quantization

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = [
    case["v5"]
    for case in json.loads((ROOT / "tests" / "cases" / "families" / "golden.json").read_text()).values()
]
SAME = {  # rows that say "the same, ..." and of which others
    "qwen3": ["qwen2"],
    "gemma3_text": ["gemma2"],
    "deepseek_v3": ["deepseek_v2"],
    "deepseek_v32": ["deepseek_v3", "deepseek_v2"],
    "kimi_k2": ["deepseek_v3", "deepseek_v2"],
    "glm4": ["glm"],
    "dots1": ["glm4_moe"],
}
ODD = [
    *(3, 0, -1, 1.5, "x", [], [1], {}, {"a": 1}, True, False, None, ["x"], "linear", float("nan"), 1e400),
    *([["full_attention"]], ["full_attention"] * 3, {"rope_type": "yarn"}, {"rope_type": []}, {"type": 3}),
    *({"full_attention": [1]}, {"rope_type": "longrope", "short_factor": [1], "long_factor": None}),
]


class Recording(dict):
    """A `config.json` that remembers which of its fields were looked at."""

    def __init__(self, raw: dict[str, Any]):
        super().__init__(raw)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def fields_read(raw: dict[str, Any]) -> set[str]:
    recording = Recording(raw)
    FAMILIES[raw["model_type"]].parse_config(recording)
    return recording.read


def documented() -> tuple[dict[str, set[str]], set[str]]:
    """The fields of each family's row in docs/families.md, and those that the page names for all."""
    text = (ROOT / "docs" / "families.md").read_text()
    lines = text.splitlines()
    rows = {m[1]: line for line in lines if (m := re.match(r"\| `(\w+)` \|", line))}
    common = "".join(line for line in lines if not line.startswith("|"))
    return {kind: set(re.findall(r"`(\w+)`", row)) for kind, row in rows.items()}, set(
        re.findall(r"`(\w+)`", common)
    )


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_that_is_read_is_documented(kind):
    rows, common = documented()
    configs = [raw for raw in CONFIGS if raw["model_type"] == kind]
    read = set().union(*map(fields_read, configs))
    assert read <= common.union(*(rows[row] for row in (kind, *SAME.get(kind, ()))))


@full_if(lambda raw: raw is not next(x for x in CONFIGS if x["model_type"] == raw["model_type"]))
@pytest.mark.parametrize("raw", CONFIGS, ids=lambda raw: raw["model_type"])
def test_an_odd_value_is_refused_or_read_never_a_traceback(raw):
    for field in fields_read(raw) | set(raw) | {"quantization_config", "rope_scaling", "rope_theta"}:
        for value in ODD:
            try:
                check_quantization({**raw, field: value})
                FAMILIES[raw["model_type"]].parse_config({**raw, field: value})
            except ValueError as refusal:
                assert "\n" not in str(refusal)
