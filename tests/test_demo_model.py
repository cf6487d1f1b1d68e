"""The models that ship: small, real, loadable by others, able to write a line of Python; and the recipe that
made them."""

import importlib
import math
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.weights import logits
from suite.marks import full
from tokenizers import Tokenizer

from duetto.checkpoints.huggingface import load_hf
from duetto.model.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
DEMO, DRAFT = (ROOT / "checkpoints" / name for name in ("demo", "demo-draft"))
EXAMPLES = ("demo_corpus", "demo_fit", "demo_folder", "demo_sample")
PROMPTS = ("import os\n\ndef read_lines(path", "class Queue:\n    def __init__(self", "def ")


@pytest.fixture(scope="module", params=[DEMO, DRAFT], ids=lambda p: p.name)
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def demo() -> tuple:
    return load_hf(DEMO, jnp.float32)


@pytest.fixture(scope="module")
def examples() -> Iterator[SimpleNamespace]:
    """The modules of the training script, as the script itself imports them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in EXAMPLES}
        yield SimpleNamespace(**modules)


def greedy(model: tuple, prompt: list[int], count: int) -> list[int]:
    config, params = model
    row = np.zeros((1, 64), np.int32)
    row[0, : len(prompt)] = prompt
    for at in range(len(prompt), len(prompt) + count):
        row[0, at] = np.argmax(logits(params, config, jnp.asarray(row))[0, at - 1])
    return row[0, len(prompt) : len(prompt) + count].tolist()


def parameter_count(folder: Path) -> int:
    return sum(x.size for x in jax.tree.leaves(load_hf(folder)[1]))


def test_the_demo_model_is_small():
    assert (DEMO / "model.safetensors").stat().st_size < 8_000_000
    assert 2_000_000 <= parameter_count(DEMO) <= 4_000_000


def test_the_draft_is_a_tenth_and_shares_the_tokenizer():
    assert (DRAFT / "model.safetensors").stat().st_size < 1_500_000
    assert parameter_count(DRAFT) < parameter_count(DEMO) / 8
    assert (DRAFT / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()


def test_what_ships_is_complete(folder: Path):
    config, params = load_hf(folder)
    mixer = config.layers[0].mixer
    assert config.max_position >= 1024 and mixer.num_heads > mixer.key_heads and config.tied_embeddings
    assert params.embed.dtype == jnp.bfloat16
    assert (folder / "loss.svg").stat().st_size < 60_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "PSF License" in card and "perplexity" in card and "loss.svg" in card


@pytest.mark.extras
def test_transformers_decodes_the_same_tokens(folder: Path, tokenizer: Tokenizer):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs, ours = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
        load_hf(folder, jnp.float32),
    )
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        mask, greedily = torch.ones(1, len(ids)), {"do_sample": False, "temperature": None, "top_p": None}
        out = theirs.generate(
            torch.tensor([ids]), attention_mask=mask, max_new_tokens=24, eos_token_id=None, **greedily
        )
        assert greedy(ours, ids, 24) == out[0, len(ids) :].tolist()


@pytest.mark.extras
def test_transformers_reads_the_tokenizer(folder: Path, tokenizer: Tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = "def f(self):\n    return 'é∀😀'\n"
    assert theirs(text).input_ids == tokenizer.encode(text).ids
    assert theirs.eos_token_id == theirs.bos_token_id == 0
    chat = theirs.apply_chat_template([{"role": "user", "content": "sort\na list"}], tokenize=False)
    assert chat == "# sort\n# a list\n"


@pytest.mark.parametrize(
    "text", ["def f(self):\n\treturn [x for x in y]  # é∀😀\r\n", "   \n\n  ", "\x00\x7f", "<|endoftext|>x"]
)
def test_the_tokenizer_gives_back_every_byte(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() <= 4096 and max(ids) < tokenizer.get_vocab_size()


@pytest.mark.full
def test_perplexity_of_the_standard_library(demo: tuple, tokenizer: Tokenizer):
    """A model that had learned nothing would be at 2048, one that knew the tokens' frequencies near 300."""
    library = Path(sysconfig.get_path("stdlib"))
    rows = [
        tokenizer.encode((library / name).read_text()).ids[:257]
        for name in ("heapq.py", "queue.py", "shelve.py")
    ]
    tokens = jnp.array(rows)
    scores = jax.nn.log_softmax(logits(demo[1], demo[0], tokens[:, :-1]))
    nats = -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()
    assert math.exp(float(nats)) < 30


@pytest.mark.full
@pytest.mark.parametrize("prompt", ["\n\ndef", full("\n\ndef ")])
def test_most_lines_after_def_parse(
    examples: SimpleNamespace, demo: tuple, tokenizer: Tokenizer, prompt: str
):
    lines = examples.demo_sample.definitions(demo, tokenizer, prompt, count=20)
    assert sum(map(examples.demo_sample.parses, lines)) > 10, lines


def test_parses_tells_python_from_noise(examples: SimpleNamespace):
    parses = examples.demo_sample.parses
    assert parses(" f(self, *args, key=None):") and parses(" __len__(self) -> int:  # pages")
    assert not parses(" f(x") and not parses(" ] = 0(s") and not parses("")


@pytest.mark.full
def test_files_are_split_by_name_alone(examples: SimpleNamespace):
    corpus = examples.demo_corpus.standard_library()
    assert not corpus.train.keys() & corpus.validation.keys()
    share = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    assert 0.03 < share < 0.12
    assert not any("/test/" in f"/{name}" or "site-packages" in name for name in corpus.train)


def test_cut_words_spell_the_same_text(examples: SimpleNamespace, tokenizer: Tokenizer):
    text = "def f(self):\n    return self.value + other\n" * 20
    whole = np.array(tokenizer.encode(text).ids, np.int32)
    cut = examples.demo_corpus.cut_spaces(whole, tokenizer, 0.5, seed=0)
    assert len(cut) > len(whole)
    assert tokenizer.decode(cut.tolist()) == text


@pytest.mark.full
def test_a_resumed_run_ends_with_the_same_weights(
    examples: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fit = examples.demo_fit
    monkeypatch.setattr(fit, "make_step", cache(fit.make_step))  # traced once for all runs
    config = ModelConfig.uniform(64, 16, 32, 1, 2, 1, 8, tied_embeddings=True)
    recipe = fit.Recipe(config, (fit.Phase(4, 2, 8), fit.Phase(2, 2, 8)), 1e-2, evaluate_every=2)
    material = fit.Material(np.random.default_rng(0).integers(0, 64, 400).astype(np.int32))

    def stop_at(last: int):
        def report(step: int, params) -> dict[str, float]:
            if step > last:
                raise KeyboardInterrupt
            return {"validation": 0.0}

        return report

    for name in ("whole", "broken", "further"):
        (tmp_path / name).mkdir()
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        whole = fit.fit(recipe, material, tmp_path / "whole", stop_at(6))
        with pytest.raises(KeyboardInterrupt):
            fit.fit(recipe, material, tmp_path / "broken", stop_at(2))
        resumed = fit.fit(recipe, material, tmp_path / "broken", stop_at(6))
        further = fit.fit(recipe, material, tmp_path / "further", stop_at(6), params=whole)
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    assert not np.array_equal(further.embed, whole.embed)
