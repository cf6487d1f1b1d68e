"""An engine on a CPU that is taken for a TPU: rows fill lanes, and the TPU's kernel, interpreted, attends."""

from typing import Any

import jax
import pytest
from cases import weights
from suite.fixtures import Model

from duetto import LLM, SamplingParams
from duetto.kvcache.kernels import tpu_attention
from duetto.model import gpus
from duetto.model.config import Dense, GroupedQuery, Latent, LayerKind, ModelConfig
from duetto.model.weights import device_forms
from duetto.serve.runtime.compiled import executable_cache

MIXERS = GroupedQuery(4, 2, 64, window=20, sinks=True), GroupedQuery(2, 1, 128), Latent(4, 128, 16, 8, 16)
OPTIONS: dict[str, Any] = {
    "max_model_len": 64, "max_num_seqs": 2, "max_prefill_tokens": 32, "page_size": 16, "reproducible": False,
    "background_compilation": False, "cpu_kernels": False,
}  # fmt: skip
PROMPTS = [[(k * i * i + i) % 300 for i in range(n)] for k, n in enumerate((37, 5))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """How many tokens of a row the kernel attends with, in programs that were traced."""
    found: set[int] = set()
    attend, choose = tpu_attention.attend_tpu, jax.lax.platform_dependent

    def interpreted(q: Any, pages: Any, attention: Any) -> Any:
        found.add(q.shape[1])
        return attend(q, pages, attention, interpret=True)

    def for_tpu(*given: Any, default: Any, **kernels: Any) -> Any:
        return kernels["tpu"](*given) if "tpu" in kernels else choose(*given, default=default, **kernels)

    monkeypatch.setattr(gpus, "is_tpu_target", lambda: True)
    monkeypatch.setattr(device_forms, "is_tpu", lambda _: True)
    monkeypatch.setattr(tpu_attention, "attend_tpu", interpreted)
    monkeypatch.setattr(jax.lax, "platform_dependent", for_tpu)
    monkeypatch.setattr(executable_cache, "program_folder", lambda: None)  # interpreters cannot be stored
    return found


def test_tokens_are_those_of_the_oracle(attended: set[int], oracle: Any):
    config = ModelConfig(384, 48, tuple(LayerKind(mixer, Dense(64)) for mixer in MIXERS), 256)
    model = Model("lanes", config, weights.drawn(weights.decisive(config)))
    expected = [oracle(model)(prompt, GREEDY) for prompt in PROMPTS]
    with LLM.from_params(config, model.params, **OPTIONS) as llm:
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [list(out.outputs[0].token_ids) for out in found] == expected
    assert attended == {1, 64}
