"""Which shapes serve together: a difference that few texts show is found too."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from fakes.greedy import greedy_programs
from suite.fixtures import Model

from duetto import LLM
from duetto.kvcache.pages import KVCache
from duetto.serve.runtime.compiled.shapes import CanonicalShapes, Shape
from duetto.serve.runtime.equal_bits.probe import MAX_TEXTS, Probe, ProbeResult

CANONICAL, OTHER = CanonicalShapes(Shape("prefill", 1, 64), Shape("decode", 8, 1)), Shape("prefill", 4, 32)


class Rounded(Probe):
    """A model whose two shapes write other bits for one text only."""

    def __init__(self, pool: jax.Array, differs: int):
        self.compared_tokens, self.pool_, self.differs, self.canonical = 128, pool, differs, CANONICAL
        self.clear_results()

    @property
    def _cache(self) -> KVCache:
        return KVCache((self.pool_,), (None,))

    def _layer_pools(self, cache: KVCache) -> Iterator[tuple[jax.Array, int]]:
        yield self.pool_, 0

    def _is_state(self, window: int) -> bool:
        return False

    def run_prefill(self, shape: Shape, tokens: int, text: int = 0) -> ProbeResult:
        return ProbeResult(
            b"other" if text == self.differs and shape != CANONICAL.prefill_shape else b"same", {}
        )


@pytest.mark.parametrize("differs", [0, 5, MAX_TEXTS - 1, MAX_TEXTS])
def test_a_small_model_is_probed_with_many_texts(differs: int):
    small = Rounded(jnp.zeros((1, 4, 64, 16), jnp.bfloat16), differs)
    assert small.matches_canonical(OTHER) == (differs == MAX_TEXTS)
    assert small.matches_canonical(CANONICAL.prefill_shape)


def test_a_large_model_is_probed_with_one():
    assert Rounded(jnp.zeros((128, 1, 1, 128), jnp.bfloat16), 1).matches_canonical(OTHER)


@greedy_programs()
def test_prefills_of_more_rows_than_slots_serve(one_layer: Model):
    sizes = {"max_num_seqs": 1, "max_prefill_tokens": 64, "max_model_len": 128, "page_size": 16}
    with LLM.from_params(one_layer.config, one_layer.params, **sizes) as llm:
        assert Shape("prefill", 2, 32) in llm.engine.classes.prefill


def test_unrounded_numbers_reveal_differences_sooner():
    whole = Rounded(jnp.zeros((1, 4, 64, 16), jnp.float32), 40)
    assert whole.matches_canonical(OTHER)
