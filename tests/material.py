"""Against material that lies beside developers' clones and is not ours to ship, or too large: `pytest
tests/material.py`.

A real model and what llama2.c says with it, real tokenizers and chat templates, and larger checkpoints of the
families with what Transformers computed of them.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece as spm
from cases.compare import log_softmax, same_tensors
from cases.text.calls import read_message
from cases.trained import sample_texts
from tokenizers import Tokenizer as Backend

from duetto import LLM, SamplingParams
from duetto.checkpoints.dialects import find_reasoning_marks, find_tool_call_marks
from duetto.checkpoints.huggingface import load_hf
from duetto.cpu_kernels.library import load_library
from duetto.lora.request import LoRARequest
from duetto.model.attention import causal
from duetto.model.config import ModelConfig
from duetto.model.embeddings.per_layer_embeddings import compute_layer_inputs
from duetto.model.layers import normalise
from duetto.model.transformer import (
    Decoder,
    compute_logits,
    embed_tokens,
    forward,
    rotary_by_layer,
    run_layer,
)
from duetto.serve.cli.convert import convert_model
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER
from duetto.serve.text.grammar.compiler import GrammarCompiler
from duetto.serve.text.openai.dialect import Dialect
from duetto.serve.text.tokenizer.chats.chat import ChatTemplateError, render_chat
from duetto.serve.text.tokenizer.detokenizer import Detokenizer
from duetto.serve.text.tokenizer.tokenizer import Tokenizer
from duetto.serve.text.tools.formats import find_tool_format
from duetto.serve.text.tools.stream_reader import ToolCallArguments, ToolCallStart
from duetto.serve.text.tools.tool import Tool, Toolbox
from duetto.serve.text.tools.tool_parser import ToolParser

pytestmark = pytest.mark.extras

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
TINY, STORIES, GPT2 = DATA / "tiny", DATA / "stories260K", DATA / "tokenizers" / "gpt2"
LENGTH = 80  # all prompts and their continuations fit: one compilation a model
NAMES = [
    "llama3", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "phi3",
    "deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "gpt_oss", "gpt2",
]  # fmt: skip
ALL = [*NAMES, "llama3_bf16_sharded"]
RECENT = [  # of families in use in 2026
    "cohere2", "deepseek_v32", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma3", "gemma4_26b_a4b",
    "gemma4_31b", "gemma4_e2b", "glm4", "glm4_moe", "gpt_neox", "granite", "granitemoe", "hunyuan_v1_dense",
    "llama4", "minimax_m2", "ministral3", "nemotron", "olmo2", "olmo3", "phi", "qwen2_moe", "seed_oss",
    "smollm3", "stablelm", "stablelm_12b", "starcoder2",
]  # fmt: skip
RECURRENT = [  # some layers keep a state in place of keys
    "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "mamba2", "qwen3_5", "qwen3_5_moe", "qwen3_next",
]  # fmt: skip
# Those whose layers differ from the others' in what engines and layouts see.
UNLIKE = [
    "cohere2", "deepseek_v32", "gemma4_26b_a4b", "gemma4_31b", "gemma4_e2b", "hunyuan_v1_dense", "llama4",
    "ministral3", "olmo3", "phi", "qwen2_moe", "stablelm_12b",
]  # fmt: skip
TWO = "--xla_force_host_platform_device_count=2"
ON_TWO = TWO in os.environ.get("XLA_FLAGS", "")
LAYOUTS = {
    "parts": {"tensor_parallel_size": 2},
    "experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "stages": {"pipeline_parallel_size": 2},
}
MIXTURES = ["qwen3_moe", "mixtral", "deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "gpt_oss"]
SERVED = {
    "parts": [*ALL, *UNLIKE],
    "experts": [*MIXTURES, "deepseek_v32", "gemma4_26b_a4b", "llama4", "qwen2_moe"],
    "stages": [*ALL, "deepseek_v32", "olmo3", "phi"],
}
SIZES = {
    "max_num_seqs": 4, "max_model_len": 80, "max_prefill_tokens": 40, "page_size": 16,
    "compilation_cache": None,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=8, ignore_eos=True)


def tolerance(name: str) -> float:
    """Of logits: the two forms of GELU differ by 2e-3."""
    return 5e-4 if name.startswith(("gemma", "gpt2")) else 1e-3


def folder_of(name: str) -> Path:
    return DATA / ("tiny_2026" if name in RECENT + RECURRENT else "tiny") / name


def cases(folder: Path) -> list[dict]:
    return json.loads((folder / "golden.json").read_text())["cases"]


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = Detokenizer(tokenizer)
    return "".join(stream.push([i]) for i in ids) + stream.finish()


# ------------------------------------------------------------ models


@partial(jax.jit, static_argnums=1)
def run(params: Decoder, config: ModelConfig, tokens: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Logits [T,V], and hidden values [1,T,D] of the embedding, after each layer, and after the norm."""
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    hidden, _ = forward(params, config, tokens[None], positions, causal)
    states, kept = [embed_tokens(params, config, tokens[None], positions)], None
    own = compute_layer_inputs(params.inputs, config, tokens[None], states[0])
    for i, turn in enumerate(rotary_by_layer(config, positions, jnp.array([LENGTH]))):
        x, kept = run_layer(
            params.layers[i], config.layers[i], config, states[-1], turn, causal, kept, i, own[i]
        )
        states.append(x)
    states.append(normalise(states[-1], params.norm, config.norm))
    return compute_logits(params, config, hidden)[0], states


def outputs(params: Decoder, config: ModelConfig, ids: list[int]):
    """The same for some tokens; what pads them lies behind and is not seen."""
    tokens = np.zeros(LENGTH, np.int32)
    tokens[: len(ids)] = ids
    return run(params, config, tokens)


def assert_greedy(logits: jax.Array, case: dict, count: int) -> None:
    """Each token of the golden continuation is the likeliest after those before it."""
    start = len(case["prompt_ids"]) - 1
    found = np.asarray(logits)[start : start + count].argmax(-1)
    assert found.tolist() == case["greedy_ids"][:count]


@pytest.mark.parametrize("name", [*ALL, *RECENT, *RECURRENT])
def test_logits_greedy_tokens_and_hidden_values(name):
    config, params = load_hf(folder_of(name), jnp.float32)
    for case in cases(folder_of(name)):
        logits, states = outputs(params, config, case["prompt_ids"] + case["greedy_ids"])
        assert_greedy(logits, case, 24)
        last = len(case["prompt_ids"]) - 1
        np.testing.assert_allclose(
            np.asarray(logits)[last], case["last_logits"], atol=tolerance(name), rtol=0
        )
        # transformers tells of the last layer's after the norm only, but for Mamba-2 of no embedding
        told = states[1:] if name == "mamba2" else [*states[:-2], states[-1]]
        found = np.stack([np.asarray(state)[0, last, :8] for state in told])
        np.testing.assert_allclose(found, case["hidden_last_pos_first8"], atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("name", [*NAMES, *RECENT, *RECURRENT])
def test_both_styles_of_configuration_say_the_same(name, tmp_path):
    """Equal configurations and equal parameters are equal in all that follows."""
    source = folder_of(name)
    folder = Path(shutil.copytree(source, tmp_path / name, copy_function=shutil.copyfile))
    shutil.copyfile(source / "config_v5.json", folder / "config.json")
    (config, params), (expected, same) = load_hf(folder, jnp.float32), load_hf(source, jnp.float32)
    assert config == expected
    for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


@pytest.mark.parametrize("i", [0, 3, 7, 11])
def test_a_trained_model_generates_the_same_text(i):
    config, params = load_hf(STORIES)
    case = cases(STORIES)[i]
    logits, _ = outputs(params, config, case["prompt_ids"] + case["greedy_ids"][:24])
    found = np.asarray(logits)[len(case["prompt_ids"]) - 1]
    np.testing.assert_allclose(found, case["prompt_last_logits"], atol=1e-3, rtol=0)
    assert_greedy(logits, case, 24)


@pytest.mark.skipif(ON_TWO, reason="this process is for layouts of two devices")
@pytest.mark.parametrize("name", [*ALL, *UNLIKE, *RECURRENT])
def test_engine_equals_transformers(name):
    assert_served(name)


@pytest.mark.skipif(not ON_TWO, reason="the test of layouts has processes with two devices")
@pytest.mark.parametrize(
    "layout, name", [(layout, name) for layout, names in SERVED.items() for name in names]
)
def test_two_devices_equal_transformers(layout, name):
    assert_served(name, reproducible=False, **LAYOUTS[layout])


@pytest.mark.skipif(ON_TWO, reason="is in one of its processes")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_two_devices(layout):
    flags = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {TWO}", "JAX_PLATFORMS": "cpu"}
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", f"two_devices_equal and {layout}-"]
    command = [sys.executable, "-m", "pytest", *options, __file__]
    done = subprocess.run(
        command, env=os.environ | flags, cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = done.stdout + done.stderr
    assert done.returncode == 0 and f"{len(SERVED[layout])} passed" in done.stdout, found


def assert_served(name, **layout):
    """Pages of 16 tokens, so that a window of 16 leaves pages behind, and a prompt of 50 in two chunks."""
    golden = cases(folder_of(name))
    with LLM(folder_of(name), dtype="float32", **SIZES | layout) as llm:
        outputs = llm.generate([case["prompt_ids"] for case in golden], GREEDY, use_tqdm=False)
        again = llm.generate([case["prompt_ids"] for case in golden], GREEDY, use_tqdm=False)
        assert llm.engine.tables.occupancy == 0
    for case, output in zip(golden, outputs, strict=True):
        completion = output.outputs[0]
        assert list(completion.token_ids) == case["greedy_ids"]
        expected = log_softmax(case["last_logits"])
        for token, found in completion.logprobs[0].items():
            assert abs(found.logprob - expected[token]) < tolerance(name)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]
    # states are found at multiples of 64 tokens, which no prompt has
    assert (sum(o.num_cached_tokens for o in again) > 0) == (name not in RECURRENT)


@pytest.mark.skipif(not load_library().isas, reason=load_library().refusal or "there are kernels")
@pytest.mark.parametrize("name", [*ALL, *RECENT, *RECURRENT])
def test_a_trainer_has_the_reported_bits(name, few_shapes):
    """Windows of 16 tokens leave pages behind; the prompt of 50 is read in two chunks."""
    with LLM(folder_of(name), dtype="bfloat16", cpu_kernels=True, **SIZES) as llm:
        texts = sample_texts(llm, (5, 50, 20), count=12)
        compute = jax.jit(llm.logprobs_fn())
        lengths = {"lengths": texts.lengths, "prompt_lengths": np.array(texts.starts)}
        texts.assert_reported(compute(llm.params, texts.tokens, **lengths))


@pytest.mark.parametrize("name", ALL)
def test_every_family_is_converted_and_converted_back(name, tmp_path):
    convert_model(TINY / name, tmp_path / "a")
    convert_model(tmp_path / "a", tmp_path / "b", "huggingface")
    ahead = "model.layers.3." if name == "deepseek_v3" else "no such name"
    assert same_tensors(TINY / name, tmp_path / "b", ahead)


# ------------------------------------------------------------ tokenizers and chat templates


@pytest.mark.parametrize(
    ("folder", "golden"),
    [(GPT2, "golden"), (DATA / "tokenizers" / "phi3", "golden"), (STORIES, "tokenizer_golden")],
    ids=lambda x: getattr(x, "name", x),
)
def test_real_tokenizers_give_the_golden_ids(folder, golden):
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    for case in json.loads((folder / f"{golden}.json").read_text()):
        assert tokenizer.encode(case["text"], add_special_tokens=folder == STORIES) == case["ids"], case[
            "text"
        ]
        assert tokenizer.decode(case["ids"], True) == case["decoded"] == streamed(tokenizer, case["ids"])


def test_sentencepiece_llama_has_the_ids_of_its_tokenizer_json(tmp_path):
    """Except where that keeps spaces that the model says to remove; of a text's own "▁" only one is taken for
    such a space."""
    shutil.copy(STORIES / "tokenizer.model", tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert ours is not None
    theirs = spm.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for case in json.loads((STORIES / "tokenizer_golden.json").read_text()):
        ids = ours.encode(case["text"])
        assert ids == [1, *theirs.encode(case["text"])]
        assert ours.decode(ids, True) == streamed(ours, ids)
        assert ours.decode(ids, True) == theirs.decode(ids) or case["text"].startswith("▁")
        kept = case["text"] == case["text"].strip(" ▁") and "  " not in case["text"]
        assert not kept or (ids, ours.decode(ids, True)) == (case["ids"], case["decoded"])


def test_gpt2s_two_files_are_its_tokenizer_json(tmp_path):
    whole = json.loads((GPT2 / "tokenizer.json").read_text())["model"]
    pairs = [" ".join(pair) if isinstance(pair, list) else pair for pair in whole["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(whole["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]) + "\n")
    ours, theirs = Tokenizer.from_folder(tmp_path), Backend.from_file(str(GPT2 / "tokenizer.json"))
    assert ours is not None
    assert (ours.eos_token, ours.eos_token_id) == ("<|endoftext|>", whole["vocab"]["<|endoftext|>"])
    for case in json.loads((GPT2 / "golden.json").read_text()):
        text = case["text"] + "<|endoftext|>" + case["text"]
        assert ours.encode(case["text"]) == case["ids"]
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(case["ids"], True) == case["decoded"] == streamed(ours, case["ids"])


def test_real_chat_templates_are_rendered_as_transformers_renders_them():
    folder = DATA / "chat_templates"
    golden = json.loads((folder / "golden.json").read_text())
    for name, expected in golden["rendered"].items():
        model, case, generate = name.split("|")
        given = golden["cases"][case]
        options = {"tools": given.get("tools"), "date_string": golden["date_string"]}
        options |= {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": generate == "gen"}
        try:
            text = render_chat((folder / f"{model}.jinja").read_text(), given["messages"], **options)
        except ChatTemplateError as error:
            text = {"error": str(error).removeprefix("the chat template failed: ")}
        assert text == expected, name


CALLING = [
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
]


@pytest.mark.parametrize("model", [*CALLING, "microsoft-Phi-3.5-mini-instruct"])
def test_replies_sent_back_to_real_chat_templates_are_rendered_alike(model):
    golden = json.loads((DATA / "chat_templates" / "golden.json").read_text())
    source = (DATA / "chat_templates" / f"{model}.jinja").read_text()
    case = golden["cases"]["tool_result"]
    options = {"bos_token": "<s>", "eos_token": "</s>", "tools": case["tools"], "date_string": "26 Jul 2024"}
    asked, said, result = case["messages"]
    function = {"name": "get_weather", "arguments": json.dumps({"city": "Oslo"})}
    bare = {"role": "assistant", "tool_calls": [said["tool_calls"][0] | {"function": function}]}
    for sent in (bare, bare | {"content": None}, bare | {"content": None, "refusal": None, "audio": None}):
        text = render_chat(source, [asked, sent, result], **options)
        assert text == golden["rendered"][f"{model}|tool_result|gen"]
    again = [asked, {"role": "assistant", "content": "Cold."}, asked]
    empty = [asked, {"role": "assistant", "content": "Cold.", "tool_calls": []}, asked]
    assert render_chat(source, empty, **options) == render_chat(source, again, **options)


@pytest.mark.parametrize("report", ["01_null_content", "02_empty_tool_calls", "03_cut_arguments"])
def test_reported_histories_are_rendered_by_a_real_template_of_deepseek(report):
    """Its calls are those of messages whose content is null, and it joins their arguments to text."""
    source = (DATA / "chat_templates" / "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja").read_text()
    messages = json.loads((DATA / "reports" / "text" / f"{report}.json").read_text())
    text = render_chat(source, messages, bos_token="<s>", eos_token="</s>")
    call = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n%s\n```"
    arguments = {"01_null_content": '{"q": "a"}', "03_cut_arguments": "{}"}
    assert (call % arguments[report] if report in arguments else "fine") in text


@pytest.mark.parametrize("model", CALLING)
def test_calls_are_found_in_what_real_chat_templates_write(model):
    """And a grammar would have allowed them."""
    template = (DATA / "chat_templates" / f"{model}.jinja").read_text()
    golden = json.loads((DATA / "chat_templates" / "golden.json").read_text())
    given = golden["cases"]["tool_result"]
    options = {"bos_token": "<s>", "eos_token": "</s>", "tools": given["tools"], "date_string": "26 Jul 2024"}
    prompt = render_chat(template, given["messages"][:1], **options)
    text = render_chat(template, given["messages"][:2], **options, add_generation_prompt=False)
    text = text.removeprefix(prompt).removesuffix("\n")
    text = text.removesuffix("<|im_end|>").removesuffix("<|eot_id|>").removesuffix("<|end|>")
    own = Tokenizer.from_folder(DEMO_FOLDER)
    assert own is not None
    dialect, box = Dialect(own, find_tool_call_marks(template).name), Toolbox(given["tools"], "required")
    begun, arguments, _ = ToolParser(dialect.require_tool_format(), box.tools).parse_chunk(text, at_end=True)
    assert begun == ToolCallStart("get_weather") and isinstance(arguments, ToolCallArguments)
    assert json.loads(arguments.text) == {"city": "Oslo"}
    grammars = GrammarCompiler(own, len(own), [own.eos_token_id])
    follower = grammars.compile_constraint(dialect.call_grammar(box, []), 0)
    follower.advance(own.encode(text.strip()))
    assert follower.failure is None


REPORTED_TOOLS = {  # tools of the texts below, and those of them in which no call is
    "find": {"q": "string", "n": "integer", "r": "number", "tags": "array", "o": "object"},
    "write": {"path": "string", "content": "string"},
    "now": {},
}
NO_CALLS = {
    "hermes single quotes", "hermes code fence", "mistral v11 no args", "llama3 nested function",
}  # fmt: skip


def test_calls_that_others_read_wrongly_have_no_tags():
    """The same ones however a text is cut, and nothing of them is left beside them."""
    tools = [
        Tool(name, {"properties": {key: {"type": kind} for key, kind in keys.items()}})
        for name, keys in REPORTED_TOOLS.items()
    ]
    reported = json.loads((DATA / "reports" / "text" / "06_texts_of_calls.json").read_text())
    for case, (name, text) in reported.items():
        calls, rest = read_message(name, text, tools=tools)
        assert read_message(name, text, range(1, len(text)), tools) == (calls, rest), case
        assert bool(calls) is (case not in NO_CALLS), case
        marks = [
            mark for mark in find_tool_format(name).marks if mark in rest + "".join(dict(calls).values())
        ]
        assert not marks or not calls or "unknown tool" in case or "in string" in case or "raw" in case, case


@pytest.mark.parametrize(
    ("model", "calls", "begin"),
    [
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", None),
        ("Qwen-Qwen2.5-7B-Instruct", "hermes", None),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek_v3", "<think>"),
        ("google-gemma-2-2b-it", None, None),
        ("meta-llama-Llama-3.1-8B-Instruct", "llama3_json", None),
        ("meta-llama-Llama-3.2-3B-Instruct", "llama3_json", None),
        ("microsoft-Phi-3.5-mini-instruct", None, None),
    ],
)
def test_marks_of_real_chat_templates(model, calls, begin):
    template = (DATA / "chat_templates" / f"{model}.jinja").read_text()
    found, marks = find_tool_call_marks(template), find_reasoning_marks(template)
    assert (found and found.name, marks and marks.begin) == (calls, begin)


# ------------------------------------------------------------ folders that others' users reported

REPORTS = DATA / "reports" / "models"
REPORTED_FOLDERS = sorted(file.parent.name for file in REPORTS.glob("*/golden.json"))


@pytest.mark.skipif(not REPORTED_FOLDERS, reason=f"{REPORTS} is not there")
@pytest.mark.parametrize("name", REPORTED_FOLDERS)
def test_reported_folders_say_what_transformers_and_peft_compute(name):
    """Each with its `overrides.json` as hf_overrides, or as an adapter of the folder that `base` names."""
    folder, options, request = REPORTS / name, {}, None
    if (folder / "overrides.json").exists():
        options = {"hf_overrides": json.loads((folder / "overrides.json").read_text())}
    if (folder / "base").exists():
        options, request = {"enable_lora": True}, LoRARequest(name, 1, str(folder))
        folder = REPORTS / (folder / "base").read_text().strip()
    golden = json.loads((REPORTS / name / "golden.json").read_text())
    texts = [case["prompt"] + [step["token"] for step in case["steps"]] for case in golden]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=8)
    with LLM(folder, dtype="float32", max_model_len=128, compilation_cache=None, **options) as llm:
        outputs = llm.generate(texts, params, lora_request=request, use_tqdm=False)
    for case, output in zip(golden, outputs, strict=True):
        rows = output.prompt_logprobs[len(case["prompt"]) :]
        for step, row in zip(case["steps"], rows, strict=True):
            found = {token: entry.logprob for token, entry in (row or {}).items()}
            assert step["gap"] < 1e-3 or max(found, key=found.__getitem__) == step["token"]
            for token in found.keys() & map(int, step["top"]):
                assert abs(found[token] - step["top"][str(token)]) < tolerance(name)


@pytest.mark.skipif(not (REPORTS / "bl_confadded").exists(), reason=f"{REPORTS} is not there")
def test_tokens_that_only_a_reported_configuration_adds_are_known():
    tokenizer = Tokenizer.from_folder(REPORTS / "bl_confadded")
    assert tokenizer is not None
    golden = json.loads((REPORTS / "bl_confadded" / "gold.json").read_text())
    assert [tokenizer.encode(text) for text in golden["texts"]] == golden["auto"]
