"""Embeddings of a library's callers."""

import json
import re

import numpy as np
import pytest
from cases.requests import IDS, PROMPTS

from duetto import PoolingParams, SamplingParams
from duetto.checkpoints.generation import read_generation_config
from duetto.serve.llm.input_processor import InputProcessor
from duetto.serve.options.engine import EngineOptions

LAST, MEAN = PoolingParams(pooling="last"), PoolingParams(pooling="mean")


def numbers(outputs) -> list[list[float]]:
    return [output.outputs.embedding for output in outputs]


@pytest.mark.usefixtures("nothing_is_left")
def test_embeddings_come_in_the_order_of_their_prompts(llm):
    found = llm.embed(PROMPTS, pooling_params=[LAST, MEAN, LAST, MEAN], use_tqdm=False)
    assert [out.prompt_token_ids for out in found] == PROMPTS and all(out.finished for out in found)
    alone = [
        llm.embed(p, pooling_params=k, use_tqdm=False)[0]
        for p, k in zip(PROMPTS, [LAST, MEAN] * 2, strict=True)
    ]
    assert numbers(found) == numbers(alone)
    assert all(np.linalg.norm(x) == pytest.approx(1.0) for x in numbers(found))
    assert found[0].outputs.hidden_size == llm.config.hidden_size


@pytest.mark.usefixtures("nothing_is_left")
def test_generation_beside_embeddings_keeps_its_tokens(llm, expected):
    from cases.requests import PARAMS, exact

    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        llm.add_request(prompt, params, request_id=str(i))
    llm.step()
    llm.embed(PROMPTS, pooling_params=MEAN, use_tqdm=False)
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {out.request_id: out for out in llm.step()}
    assert exact([outputs[str(i)] for i in range(len(PROMPTS))]) == expected


@pytest.mark.usefixtures("nothing_is_left", "unchecked")
@pytest.mark.parametrize(
    ("prompt", "params", "error", "named"),
    [
        ([], LAST, ValueError, "empty"),
        ([[10**6]], LAST, ValueError, "1000000"),
        (IDS, PoolingParams(dimensions=10**6), ValueError, "dimensions 1000000 is not allowed: at most"),
        (IDS, [LAST, LAST], ValueError, "1 prompts have 2 pooling_params"),
        (IDS, "last", TypeError, "PoolingParams"),
    ],
)
def test_what_is_not_allowed_is_named(llm, prompt, params, error, named):
    with pytest.raises(error, match=named):
        llm.embed([[]] if prompt == [] else prompt, pooling_params=params, use_tqdm=False)


MODES = [
    ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
    ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
    ({"pooling_mode": "lasttoken"}, "last"),
    ({"pooling_mode_cls_token": True}, "cls_token"),
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls_token+mean_tokens"),
    (None, None),
]


@pytest.mark.parametrize(("stated", "pooling"), MODES)
def test_a_model_says_how_it_is_pooled(llm, monkeypatch, tmp_path, stated, pooling):
    (tmp_path / "config.json").write_text("{}")
    if stated is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(stated))
    assert read_generation_config(tmp_path).pooling == pooling
    monkeypatch.setattr(llm.input_processor, "default_pooling", pooling)
    if pooling not in ("last", "mean", None):
        with pytest.raises(ValueError, match=f"{re.escape(repr(pooling))} is not supported"):
            llm.embed(IDS, use_tqdm=False)
    else:
        asked = MEAN if pooling == "mean" else LAST
        assert numbers(llm.embed(IDS, use_tqdm=False)) == numbers(
            llm.embed(IDS, pooling_params=asked, use_tqdm=False)
        )


def test_a_model_without_a_head_makes_embeddings_and_no_text():
    intake = InputProcessor(8, 64, EngineOptions(), None, (), has_head=False)
    assert intake.make_subscription([1, 2], PoolingParams()).requests[0].pooler is not None
    with pytest.raises(ValueError, match="the checkpoint stores no lm_head: it makes embeddings"):
        intake.make_subscription([1, 2], SamplingParams())


def test_a_dense_layer_behind_the_pooling_is_noticed(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    modules = [{"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert read_generation_config(tmp_path).pooling == "dense"
