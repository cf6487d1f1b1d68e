"""Requests under a grammar: their tokens are the oracle's, under the same masks, whoever is beside them and
however they are served; their neighbours keep every bit."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jsonschema
import numpy as np
import pytest
from cases.adapters import write
from cases.invariance import BASE, bits
from cases.oracle import Model, next_token
from cases.programs import StoredJit
from cases.sampling import admit_jit
from cases.text.letters import letters
from tokenizers import AddedToken

from duetto import LLM, RequestOutput, SamplingParams
from duetto.lora.request import LoRARequest
from duetto.sampling.params import fold_seed, request_knobs
from duetto.sampling.state import empty_sampling_state, load_masks, num_mask_words
from duetto.sampling.structured import StructuredOutputsParams
from duetto.serve.engine.core.request import Request
from duetto.serve.runtime.compiled import lowering
from duetto.serve.runtime.compiled.futures import PendingSample
from duetto.serve.text.grammar.compiler import GrammarCompiler

MASKBENCH = Path(__file__).resolve().parents[5] / "shared" / "data" / "json_schemas" / "maskbench_240.jsonl"
END = 256  # behind the bytes; the model's vocabulary is larger
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["alpha", "beta"]}, "sizes": {"items": {"type": "integer"}}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}  # fmt: skip
ASKED = [
    StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    StructuredOutputsParams(regex=r"[a-f]{3}-[0-9]{20}"),
    StructuredOutputsParams(choice=["yes", "no", "perhaps not"]),
    StructuredOutputsParams(grammar='start: "<" /[a-z]/* ">" <[299]>'),  # a token without text
    None,
]
PATTERNS = [r"[a-f]{3}-[0-9]{20}", "yes|no|perhaps not", "<[a-z]*>"]
DRAWN = {"temperature": 1.3, "top_p": 0.97, "max_tokens": 40, "logprobs": 3, "presence_penalty": 0.3}
PARAMS = [
    SamplingParams(structured_outputs=asked, **DRAWN | {"temperature": t, "seed": i, "min_tokens": i % 3})
    for i, (asked, t) in enumerate([(ASKED[i % 5], 1.3 if i < 5 else 0.0) for i in range(7)])
]
LENGTHS = [1, 5, 63, 64, 65, 130, 33]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 250, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def tokenizer():
    return letters(None, AddedToken("<end>", special=True))


@pytest.fixture(scope="module")
def serve(tiny, tokenizer):
    own = {"eos_token_ids": [END], "tokenizer": tokenizer}
    return lambda model=tiny, **options: LLM.from_params(model.config, model.params, **(BASE | own | options))


@pytest.fixture(scope="module")
def base(serve):
    with serve() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(tiny, tokenizer):
    grammars = GrammarCompiler(tokenizer, tiny.config.vocab_size, [END])
    return [continue_plainly(tiny, grammars, *one) for one in zip(prompts(), PARAMS, strict=True)]


masks_jit = StoredJit(load_masks)


def continue_plainly(
    model: Model, grammars: GrammarCompiler, prompt: list[int], params: SamplingParams
) -> list[int]:
    """The whole text forward for every token, under the mask of that position."""
    tokens, V = list(prompt), model.config.vocab_size
    constraint = params.structured_outputs and grammars.compile_constraint(
        params.structured_outputs, len(prompt)
    )
    knobs = request_knobs(params, seed=fold_seed(params.seed), stop_ids=(END,), prompt_len=len(prompt))
    state, zero = admit_jit(empty_sampling_state(1, V), np.int32(0), knobs), np.zeros(1, np.int32)
    most = len(prompt) + (params.max_tokens or 16)
    while tokens[-1] != END and len(tokens) < most:
        if constraint:
            constraint.advance(tokens)
            masks = constraint.token_masks()[:, : num_mask_words(V)]
            given = zero, np.full(1, len(tokens), np.int32), masks[None]
            state = replace(state, token_masks=masks_jit(state.token_masks, *given))
        padded = np.zeros((1, 256), np.int32)
        padded[0, : len(tokens)] = tokens
        position = np.full(1, len(tokens), np.int32)
        token, state = next_token(model.params, model.config, padded, position, state)
        tokens.append(int(token[0]))
    return tokens[len(prompt) :]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_alone_and_beside_each_other_equal_the_oracle(base, expected):
    alone = [base.generate(p, s, use_tqdm=False)[0] for p, s in zip(prompts(), PARAMS, strict=True)]
    assert tokens_of(alone) == expected
    base.engine.tables.reset_prefix_cache()
    for _ in range(2):  # the second time with prefixes found
        together = base.generate(prompts(), PARAMS, use_tqdm=False)
        assert [bits(o) for o in together] == [bits(o) for o in alone]


@pytest.fixture
def split_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes of two programs, as accelerators have."""
    monkeypatch.setattr(lowering, "is_decode_split", lambda _: True)


@pytest.fixture
def late_draws(split_decodes, monkeypatch: pytest.MonkeyPatch) -> list[PendingSample]:
    """Draws that waited for grammars, as they are dispatched. The third one fails."""
    seen, draw = [], PendingSample.draw

    def drawn(pending: PendingSample, *given: Any) -> Any:
        seen.append(pending)
        if len(seen) == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        return draw(pending, *given)

    monkeypatch.setattr(PendingSample, "draw", drawn)
    return seen


def test_draws_that_wait_for_grammars_change_no_bit(serve, base, late_draws, monkeypatch):
    """Rows without a grammar, and all others, keep their bits, also when a draw fails and when requests are
    preempted."""
    base.engine.tables.reset_prefix_cache()
    wanted = [bits(o) for o in base.generate(prompts(), PARAMS, use_tqdm=False)]
    assert not late_draws
    with serve(max_batched_token_mem=320, page_size=16) as llm:
        assert [bits(o) for o in llm.generate(prompts(), PARAMS, use_tqdm=False)] == wanted
        assert len(late_draws) > 3 and llm.report()["preemptions"] > 0
        assert llm.report()["compilations"] == 0 and llm.engine.tables.occupancy == 0


def test_neighbours_with_adapters_wait_for_no_grammar(serve, one_layer, few_shapes, late_draws, tmp_path):
    """While adapters come and go, which changes no bit."""
    folders = [write(tmp_path / name, one_layer.config, 2 + i, i) for i, name in enumerate("abc")]
    asked = [LoRARequest(folder.name, i, str(folder)) for i, folder in enumerate(folders, 1)]
    whose = [asked[0], None, asked[1], asked[2], None, asked[0], asked[1]]
    with serve(one_layer, enable_lora=True, max_loras=2) as llm:

        def answered() -> list[Any]:
            llm.engine.tables.reset_prefix_cache()
            return [bits(o) for o in llm.generate(prompts(), PARAMS, use_tqdm=False, lora_request=whose)]

        llm.engine.can_defer_sampling = False
        wanted = answered()
        assert not late_draws
        llm.engine.can_defer_sampling = True
        assert answered() == wanted == answered()
        assert late_draws and llm.report()["compilations"] == 0


def test_ended_outputs_match_the_grammar(base, tokenizer):
    """At any temperature, and with parameters that would rather have something else."""
    odd = {
        "max_tokens": 64,
        "logit_bias": {END: 40.0},
        "bad_words": ["yes", "a"],
        "min_tokens": 30,
    }
    params = [SamplingParams(seed=1, temperature=2.0, structured_outputs=a, **odd) for a in ASKED[1:4]]
    texts = [o.outputs[0].text for o in base.generate([[5]] * 3, params, use_tqdm=False)]
    assert all(re.fullmatch(*pair) for pair in zip(PATTERNS, texts, strict=True)), texts


LIST = {"items": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "minItems": 2, "maxItems": 6}
SCHEMAS = [
    SCHEMA,
    {"type": "integer", "minimum": 3, "maximum": 70},
    {"type": "string", "maxLength": 5},
    LIST | {"type": "array"},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 1}]},
]


def test_finished_outputs_validate(base):
    """Of a model that says anything: what is not finished was cut by its length."""
    asked = [StructuredOutputsParams(json=schema, disable_any_whitespace=True) for schema in SCHEMAS]
    params = [SamplingParams(structured_outputs=a, seed=3, n=8, max_tokens=120) for a in asked]
    ended = 0
    for schema, output in zip(
        SCHEMAS, base.generate([[5]] * len(params), params, use_tqdm=False), strict=True
    ):
        for one in output.outputs:
            assert one.finish_reason in ("stop", "length")
            if one.finish_reason == "stop":
                jsonschema.validate(json.loads(one.text), schema)
                ended += 1
    assert ended > 20


@pytest.mark.minutes
@pytest.mark.skipif(not MASKBENCH.exists(), reason=f"there is no {MASKBENCH.name} beside the clone")
def test_finished_outputs_of_all_schemas_validate():
    """Four answers of the model that ships to each schema of MaskBench that llguidance knows."""
    schemas = [json.loads(line)["schema"] for line in MASKBENCH.read_text().splitlines()]
    ended = cut = refused = 0
    with LLM(max_num_seqs=32, max_model_len=1024) as llm:
        for number, schema in enumerate(schemas):
            asked = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
            params = SamplingParams(structured_outputs=asked, seed=number, n=4, max_tokens=400)
            try:
                llm.add_request("JSON: ", params, request_id=str(number))
            except ValueError as error:
                assert str(error).startswith("structured_outputs is not allowed: ")
                refused += 1
        while llm.has_unfinished_requests():
            for output in llm.step():
                for one in output.outputs:
                    assert one.finish_reason in ("stop", "length"), one.stop_reason
                    cut += one.finish_reason == "length"
                    if one.finish_reason == "stop":
                        jsonschema.validate(json.loads(one.text), schemas[int(output.request_id)])
                        ended += 1
    print(f"{ended} finished outputs are valid, {cut} were cut, {refused} of {len(schemas)} schemas refused")
    assert ended > 400


class Scripted:
    """A drafter that guesses what it was told, right or wrong."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong: bool):
        self.texts, self.wrong, self.known = texts, wrong, dict[Request, list[int]]()

    def begin(self, request: Request, prompt: Sequence[int], salt: bytes = b"") -> None:
        self.known[request] = list(prompt)

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        self.known[request] += tokens

    def propose(self, request: Request, k: int) -> list[int]:
        known = self.known[request]
        whole = next(text for text in self.texts if text[: len(known)] == known)
        guess = whole[len(known) : len(known) + k]
        return [(t + (i == 2)) % END for i, t in enumerate(guess)] if self.wrong else list(guess)

    def end(self, request: Request) -> None:
        del self.known[request]


@pytest.fixture(scope="module")
def guessing(serve):
    """Seven guesses a row, and so few pages that requests are preempted."""
    config = {"method": "ngram", "num_speculative_tokens": 7, "adaptive": False}
    sizes = {"max_model_len": 230, "max_batched_token_mem": 240, "page_size": 16, "max_num_seqs": 4}
    with serve(**sizes, max_prefill_tokens=32, decode_steps=1, speculative_config=config) as llm:
        yield llm


@pytest.mark.full
@pytest.mark.parametrize("wrong", [False, True])
def test_draft_tokens_and_preemption_change_no_token(guessing, base, expected, wrong):
    texts = [prompt + tokens for prompt, tokens in zip(prompts(), expected, strict=True)]
    guessing.engine.speculation.drafter = Scripted(texts, wrong)
    guessing.engine.tables.reset_prefix_cache()
    before = guessing.report()
    assert tokens_of(guessing.generate(prompts(), PARAMS, use_tqdm=False)) == expected
    after = guessing.report()
    assert after["preemptions"] > 0 and after["compilations"] == before["compilations"]
    drafted, accepted = (
        after["speculation"][key] - before["speculation"][key] for key in ("drafted", "accepted")
    )
    assert 0 < accepted < drafted if wrong else accepted == drafted > 0
