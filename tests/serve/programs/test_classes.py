"""Which shapes serve together: a difference that few texts show is found too."""

import jax
import jax.numpy as jnp
import pytest

from duetto.kvcache.pages import KVCache
from duetto.serve.programs.classes import TEXTS, Probe, Written, same_rows
from duetto.serve.programs.shapes import Canonical, Shape

CANONICAL, OTHER = Canonical(Shape("prefill", 1, 64), Shape("decode", 8, 1)), Shape("prefill", 4, 32)


class Rounded(Probe):
    """A model whose two shapes write other bits for one text only."""

    def __init__(self, pool: jax.Array, differs: int):
        self.tokens, self.pool_, self.differs, self.canonical = 128, pool, differs, CANONICAL

    @property
    def _cache(self) -> KVCache:
        return KVCache((self.pool_,), (None,))

    def prefill(self, shape: Shape, tokens: int, text: int = 0) -> Written:
        return Written(b"other" if text == self.differs and shape != CANONICAL.prefill else b"same", {})


@pytest.mark.parametrize("differs", [0, 5, TEXTS - 1, TEXTS])
def test_a_small_model_is_probed_with_many_texts(differs: int):
    small = Rounded(jnp.zeros((1, 4, 64, 16), jnp.bfloat16), differs)
    assert small.agrees(OTHER) == (differs == TEXTS)
    assert small.agrees(CANONICAL.prefill)


def test_a_large_model_is_probed_with_one():
    assert Rounded(jnp.zeros((128, 1, 1, 128), jnp.bfloat16), 1).agrees(OTHER)


def test_numbers_that_are_not_rounded_tell_sooner():
    whole = Rounded(jnp.zeros((1, 4, 64, 16), jnp.float32), 40)
    assert whole.agrees(OTHER)


class Narrow(Probe):
    """A model whose narrow decode writes other bits for one text only."""

    def __init__(self, differs: int, capacity: int = 16):
        self.canonical, self.differs, self.pool, self.capacity = CANONICAL, differs, 64, capacity

    def _decode(self, shape: Shape, steps: int, first: int) -> list[bytes]:
        texts = [(first + row) % self.sequences for row in range(self._rows(shape))]
        return [b"%d%d" % (text, text == self.differs and shape != CANONICAL.decode) for text in texts]


@pytest.mark.parametrize("differs", [0, 3, 4, 7, 8])
def test_a_narrow_shape_is_compared_on_all_texts(differs: int):
    probe = Narrow(differs)
    expected = probe.decode(CANONICAL.decode, 4)
    for rows in (1, 3, 4, 16):
        assert same_rows(probe.decode(Shape("decode", rows, 1), 4), expected) == (differs == 8)


def test_an_engine_of_few_seats_is_compared_on_as_many_texts():
    probe = Narrow(5, capacity=5)
    expected = probe.decode(CANONICAL.decode, 4)
    assert [len(probe.decode(Shape("decode", rows, 1), 4)) for rows in (2, 4, 8)] == [5, 5, 5]
    assert same_rows(probe.decode(Shape("decode", 4, 1), 4), expected)
