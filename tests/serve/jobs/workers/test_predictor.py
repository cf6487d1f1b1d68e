"""The class that Ray, Spark and Dask call with batches, without any of them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases.requests import SIZES, SMALLEST

from duetto import SamplingParams
from duetto.ray import ERROR, Predictor, ProcessorConfig, postprocess_row

OWN: dict[str, Any] = SIZES | {"max_prefill_delay": 0.0, "background_compilation": False}


class Frame(dict):
    """As much of a pandas frame as is used."""

    def assign(self, **columns: Any) -> "Frame":
        return Frame({**self, **columns})


@pytest.fixture(scope="module")
def predictor() -> Iterator[Predictor]:
    given = {"max_tokens": 6, "ignore_eos": True}
    config = ProcessorConfig(SMALLEST, OWN, sampling_params=given, should_continue_on_error=True)
    made = Predictor(config)
    yield made
    made.llm.close()


def test_a_batch_comes_back_with_answers(predictor):
    batch = {
        "prompt": np.array(["import", "def f(", "x"], object),
        "sampling_params": [
            {"temperature": 0.0},
            {"max_tokens": np.int64(3), "seed": 7},
            {"temperature": -1},
        ],
        "id": [5, 6, 7],
    }
    found = predictor(batch)
    params = [SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=0)]
    own = {
        name: getattr(predictor.default_params, name) for name in ("temperature", "top_p", "top_k", "min_p")
    }
    params.append(SamplingParams.from_dict(own | {"max_tokens": 3, "ignore_eos": True, "seed": 7}))
    whole = predictor.llm.generate(["import", "def f("], params, use_tqdm=False)
    assert found["generated_text"] == [*(out.outputs[0].text for out in whole), ""]
    assert found["generated_tokens"] == [*(out.outputs[0].token_ids for out in whole), []]
    assert found["num_generated_tokens"] == [6, 3, 0] and found["id"] == [5, 6, 7]
    assert found["num_input_tokens"] == [*(len(out.prompt_token_ids) for out in whole), 0]
    assert found[ERROR][:2] == ["", ""] and found[ERROR][2].startswith("ValueError: temperature=-1")


def test_rows_may_be_chats_or_tokens_and_batches_dataframes(predictor):
    talk = [{"role": "user", "content": "sort a list"}]
    frame = predictor(Frame(messages=[talk, None, None], tokenized_prompt=[None, np.array([60, 61]), None]))
    assert isinstance(frame, Frame) and frame["num_generated_tokens"] == [6, 6, 0]
    assert frame["num_input_tokens"][1] == 2 and "a row has messages, prompt or" in frame[ERROR][2]
    assert predictor({"prompt": []})["generated_text"] == []


def test_a_wrong_row_ends_the_batch_by_default(predictor):
    strict = object.__new__(Predictor)
    strict.config = ProcessorConfig()
    strict.llm, strict.default_params = predictor.llm, predictor.default_params
    with pytest.raises(ValueError, match="the prompt is empty"):
        strict({"prompt": ["import", ""]})
    assert not predictor.llm.has_unfinished_requests()


def test_rows_with_an_error_bypass_what_comes_after():
    wrong = {ERROR: "no", "generated_text": ""}
    assert postprocess_row(lambda row: {"text": row["generated_text"]}, wrong) == wrong
    assert postprocess_row(
        lambda row: {"text": row["generated_text"]}, {ERROR: "", "generated_text": "x"}
    ) == {
        "text": "x",
        ERROR: "",
    }
