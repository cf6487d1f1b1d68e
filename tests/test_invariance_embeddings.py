"""An encoder's embeddings in a prompt change no bits of what would be computed from tokens."""

import pytest
from cases.encoders import as_embeddings, with_table_encoder
from cases.invariance import BASE, PARAMS, PENALISED, bits, prompts
from suite.fixtures import with_few_shapes
from suite.marks import full

from duetto import LLM


@pytest.mark.parametrize(
    "model", ["tiny", full("windows"), full("recurrent"), full("bfloat16")], indirect=True, scope="session"
)
def test_embeddings_in_place_of_tokens_equal_alone(model, expected):
    """Their spans cross borders of pages and of chunks. Penalties, which count placeholders, are left out."""
    reader, texts = with_table_encoder(model), prompts(model.config.vocab_size)
    chosen = [i for i, params in enumerate(PARAMS) if params is not PENALISED]
    spans = [[(0, 1)], [(1, 5)], [(3, 40)], [], [(20, 64)], [(40, 88), (88, 129)], [(1, 49), (100, 140)]]
    asked = [as_embeddings(texts[i], model.config.vocab_size, *spans[i]) for i in chosen]
    own = BASE | {"kv_cache_dtype": model.kv_cache_dtype, "decode_steps": 1}
    with with_few_shapes(), LLM.from_params(reader.config, reader.params, **own) as llm:
        for _ in range(2):  # the second from pages
            found = llm.generate(asked, [PARAMS[i] for i in chosen], use_tqdm=False)
            assert [bits(o) for o in found] == [expected[i] for i in chosen]
