"""Methods, arguments and results that are there for scripts written for vLLM, on a model that ships."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases.requests import SIZES, SMALLEST
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from duetto import LLM, SamplingParams
from duetto.lora.request import LoRARequest
from duetto.sampling.params import BeamSearchParams
from duetto.serve.llm.metrics import Counter, Gauge, Histogram, Metric
from duetto.serve.server.routes.state import engine_metric_families
from duetto.serve.server.service.exposition import Exposition
from duetto.serve.text.tokenizer.chats.chat import ChatTemplateError

PARAMS = SamplingParams(temperature=0.7, seed=5, max_tokens=6, ignore_eos=True)
PROMPT = "def add(a, b):\n    "
TALK = [{"role": "user", "content": "Add two numbers."}]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(SMALLEST, **SIZES) as llm:
        yield llm


# ---------------------------------------------------------------- generate and chat


def test_arguments_that_ask_for_nothing(llm):
    (plain,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    nothing = {"lora_request": None, "priority": None, "tokenization_kwargs": None, "mm_processor_kwargs": {}}
    (same,) = llm.generate(PROMPT, PARAMS, use_tqdm=False, **nothing)
    assert same.outputs == plain.outputs
    (reply,) = llm.chat(TALK, PARAMS, use_tqdm=False, chat_template_content_format="string", **nothing)
    assert reply.outputs == llm.chat(TALK, PARAMS, use_tqdm=False)[0].outputs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenization_kwargs", {"truncate_prompt_tokens": 5}),
        ("mm_processor_kwargs", {"num_crops": 4}),
        ("chat_template_content_format", "openai"),
    ],
)
def test_arguments_that_ask_for_more_are_refused(llm, name, value):
    with pytest.raises(ValueError, match=f"^{name}=.*is not supported: only"):
        llm.chat(TALK, PARAMS, use_tqdm=False, **{name: value})


def test_adapters_are_refused_where_none_are_served(llm):
    for wanted in (LoRARequest("sql", 1, "/sql"), [LoRARequest("sql", 1, "/sql")]):
        with pytest.raises(ValueError, match="lora_request is not allowed: set enable_lora"):
            llm.chat(TALK, PARAMS, use_tqdm=False, lora_request=wanted)
    with pytest.raises(TypeError, match="lora_request is a LoRARequest or None, not 'adapter'"):
        llm.generate(PROMPT, PARAMS, use_tqdm=False, lora_request="adapter")
    with pytest.raises(ValueError, match="1 prompts have 2 lora_requests"):
        llm.generate(PROMPT, PARAMS, use_tqdm=False, lora_request=[None, None])


def test_a_reply_has_the_text_of_its_prompt(llm):
    (reply,) = llm.chat(TALK, PARAMS, use_tqdm=False, chat_template=TEMPLATE)
    assert reply.prompt == "<user>Add two numbers.</><assistant>"
    assert llm.get_tokenizer().decode(reply.prompt_token_ids, skip_special_tokens=False) == reply.prompt
    llm.enqueue_chat([TALK, TALK], PARAMS, use_tqdm=False, chat_template=TEMPLATE)
    done = llm.wait_for_completion(use_tqdm=False)
    assert [o.prompt for o in done] == [reply.prompt] * 2 and done[1].outputs == reply.outputs


def test_the_last_message_is_continued(llm):
    talk = [*TALK, {"role": "assistant", "content": "def add(a, b):\n    "}]
    own = {"use_tqdm": False, "chat_template": TEMPLATE, "continue_final_message": True}
    (reply,) = llm.chat(talk, PARAMS, add_generation_prompt=False, **own)
    assert reply.prompt == "<user>Add two numbers.</><assistant>def add(a, b):"  # the template trims
    with pytest.raises(ChatTemplateError, match="needs add_generation_prompt=False"):
        llm.chat(talk, PARAMS, **own)
    with pytest.raises(ChatTemplateError, match="leaves the last message's text out"):
        llm.chat(
            talk, PARAMS, add_generation_prompt=False, **{**own, "chat_template": "{{ messages[0].content }}"}
        )
    with pytest.raises(ChatTemplateError, match="no text that could be continued"):
        llm.chat([{"role": "user", "content": ""}], PARAMS, add_generation_prompt=False, **own)


def test_the_progress_bar_shows_the_rate(llm, capsys):
    llm.generate([PROMPT, PROMPT], PARAMS)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown and "2/2" in shown
    read, written = re.findall(r"est. speed input: ([\d.]+) toks/s, output: ([\d.]+) toks/s", shown)[-1]
    assert float(read) > 0 and float(written) > 0
    bars = []

    def own(*args, **kwargs):
        bars.append(tqdm(*args, **kwargs))
        return bars[-1]

    llm.generate([PROMPT, PROMPT], PARAMS, use_tqdm=own)
    llm.chat(TALK, PARAMS, use_tqdm=own)
    llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=2), use_tqdm=own)
    assert [(bar.n, bar.total, bar.desc) for bar in bars] == [
        (2, 2, "Processed prompts"),
        (1, 1, "Processed prompts"),
        (2, 2, "Beam search"),
    ]
    capsys.readouterr()
    llm.generate(PROMPT, PARAMS, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_beams_have_the_text_of_all_their_tokens(llm):
    (found,) = llm.beam_search([{"prompt": PROMPT}], BeamSearchParams(beam_width=3, max_tokens=4))
    assert len(found.sequences) == 3
    for sequence in found.sequences:
        assert sequence.text == llm.get_tokenizer().decode(sequence.tokens, skip_special_tokens=False)
        assert sequence.text.startswith(PROMPT)


# ---------------------------------------------------------------- what is counted


def test_metrics_of_a_request_have_vllms_names(llm):
    (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    m = output.metrics
    assert m.num_generation_tokens == 6
    assert m.arrival_time > 1.6e9  # of the day, where the others are monotonic
    assert m.queued_ts <= m.scheduled_ts <= m.first_token_ts < m.last_token_ts <= m.arrival + m.e2e
    assert m.first_token_latency == m.ttft
    assert m.tpot == pytest.approx((m.arrival + m.e2e - m.first_token_ts) / 5)


def test_an_aborted_request_has_no_first_token(llm):
    id = llm.add_request(PROMPT, PARAMS)
    llm.abort(id)
    (output,) = llm.wait_for_completion(use_tqdm=False)
    m = output.metrics
    assert (m.num_generation_tokens, m.first_token_ts, m.last_token_ts, m.first_token_latency) == (0, 0, 0, 0)


def by_name(metrics: list[Metric], kind: type) -> dict[str, Any]:
    return {m.name + m.labels.get("finished_reason", ""): m for m in metrics if isinstance(m, kind)}


def test_metrics_of_the_engine(llm):
    before = llm.get_metrics()
    outputs = llm.generate([PROMPT, PROMPT + "x"], replace(PARAMS, n=2), use_tqdm=False)
    llm.add_request(PROMPT, PARAMS)
    llm.step()
    during = by_name(llm.get_metrics(), Gauge)
    assert during["vllm:num_requests_running"].value == 1 and during["vllm:kv_cache_usage_perc"].value > 0
    llm.wait_for_completion(use_tqdm=False)
    after = llm.get_metrics()
    assert all(g.value == 0 for g in by_name(after, Gauge).values())
    old, new = by_name(before, Counter), by_name(after, Counter)
    grown = {name: metric.value - old[name].value for name, metric in new.items()}
    prompts = 2 * sum(len(o.prompt_token_ids) for o in outputs) + len(outputs[0].prompt_token_ids)
    assert grown["vllm:prompt_tokens"] == grown["vllm:prefix_cache_queries"] == prompts
    assert grown["vllm:generation_tokens"] == 30 and grown["vllm:request_successlength"] == 5
    assert grown["vllm:request_successabort"] == 0
    past, now = by_name(before, Histogram), by_name(after, Histogram)
    of_steps = {"vllm:iteration_tokens_total", "vllm:inter_token_latency_seconds"}
    for name, found in now.items():
        assert found.count - past[name].count == 5 or name in of_steps
        assert found.buckets["+Inf"] == found.count
        assert list(found.buckets.values()) == sorted(found.buckets.values())
    tokens = now["vllm:request_generation_tokens"]
    assert tokens.sum - past[tokens.name].sum == 30
    steps, between = (now[name].sum - past[name].sum for name in sorted(of_steps, reverse=True))
    assert steps == prompts - grown["vllm:prefix_cache_hits"] + 30
    spans = [now[f"vllm:{name}_seconds"] for name in ("request_decode_time", "inter_token_latency")]
    assert between == pytest.approx(spans[0].sum - past[spans[0].name].sum)  # the same gaps
    assert tokens.buckets["5.0"] == past[tokens.name].buckets["5.0"]
    assert tokens.buckets["10.0"] == past[tokens.name].buckets["10.0"] + 5


def test_the_grafana_dashboard_uses_existing_metrics(llm):
    """Grafana's: every series in it is one of ours, with the labels that it is told apart by."""
    written = Exposition(lambda: engine_metric_families(llm, "demo")).render()
    samples = text_string_to_metric_families(written.decode())
    served = {sample.name: sample.labels for family in samples for sample in family.samples}
    board = json.loads((Path(__file__).parents[3] / "examples/grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = {name for expression in asked for name in re.findall(r"vllm:\w+", expression)}
    assert len(named) > 20 and named <= served.keys()
    assert all('{model_name=~"$model"}' in expression for expression in asked)
    assert "finished_reason" in served["vllm:request_success_total"] and "model_name" in served[min(named)]


def test_a_profile(llm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = llm.start_profile("first")
    llm.generate(PROMPT, replace(PARAMS, max_tokens=2), use_tqdm=False)
    llm.stop_profile()
    (profile,) = folder.rglob("*.xplane.pb")
    assert folder == tmp_path / "duetto-profile" / "first" and b"duetto.schedule" in profile.read_bytes()
    assert str(folder) in capsys.readouterr().err
    with pytest.raises(RuntimeError):
        llm.stop_profile()


# ---------------------------------------------------------------- what is not here


@pytest.mark.parametrize("name", ["encode", "reward", "classify", "score"])
def test_pooling_is_refused_with_what_is_there_instead(llm, name):
    with pytest.raises(NotImplementedError, match=rf"LLM\.{name} is not here: .*LLM\.(embed|log_likelihood)"):
        getattr(llm, name)(["a"], ["b"], use_tqdm=False)


@pytest.mark.parametrize("name", ["collective_rpc", "apply_model"])
def test_workers_are_refused_with_what_is_there_instead(llm, name):
    with pytest.raises(NotImplementedError, match=rf"LLM\.{name} is not here: .*LLM\.update_params"):
        getattr(llm, name)(lambda model: model)
    assert callable(llm.log_likelihood) and callable(llm.update_params)
    assert llm.get_world_size() == 1
