"""What tests of models share."""

from dataclasses import replace

import jax
import pytest
from cases.weights import MIXED, drawn

from duetto.model.transformer import Decoder, decoder_spec
from duetto.model.tree import is_spec


@pytest.fixture(scope="session")
def mixed() -> Decoder:
    """Grouped-query and latent attention, a dense layer and two mixtures, with weights that matter."""
    specs = jax.tree.map(
        lambda s: replace(s, scale=0.1) if s.mean == 0 else s, decoder_spec(MIXED), is_leaf=is_spec
    )
    return drawn(specs)
