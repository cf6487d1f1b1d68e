"""Inputs of an encoder on the host, and the buckets to which they are padded."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Shaped

from ....model.embeddings.encoder import Encoder


@dataclass(frozen=True)
class EncoderKey:
    """Key of the program that encodes an input of at most `items` items, in a table of programs."""

    items: int

    @property
    def product_rows(self) -> int:
        return self.items

    def __str__(self) -> str:
        return f"encode[{self.items}]"


def encoder_keys(encoder: Encoder | None) -> list[EncoderKey]:
    """Return the keys of an encoder's programs."""
    return [] if encoder is None else list(map(EncoderKey, encoder.buckets))


def choose_bucket(encoder: Encoder, encoder_input: Any) -> int:
    """Return the smallest bucket that holds an input. Raises ValueError, with both numbers, if none does."""
    items = len(jax.tree.leaves(encoder_input)[0])
    if items > (largest := max(encoder.buckets)):
        raise ValueError(f"an encoder's input has {items} items, at most {largest} are allowed")
    return min(bucket for bucket in encoder.buckets if bucket >= items)


def check_encoder_input(encoder: Encoder, encoder_input: Any) -> int:
    """Check that an input is as the encoder takes it; returns the number of embeddings that are made of it.
    Raises ValueError if it is not."""
    arrays, structure = jax.tree.flatten(encoder_input)
    expected, expected_structure = jax.tree.flatten(encoder.abstract_input(encoder.buckets[0]))
    if structure != expected_structure or not all(map(partial(is_input_array, arrays[0]), arrays, expected)):
        input_text = ", ".join(f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}" for x in arrays)
        expected_text = ", ".join(f"{x.dtype}[n, {str(list(x.shape[1:]))[1:]}" for x in expected)
        raise ValueError(f"an encoder's input is {input_text or None}, expected {expected_text}")
    choose_bucket(encoder, encoder_input)
    return encoder.num_rows(len(arrays[0]))


def is_input_array(first: Any, x: Any, expected: jax.ShapeDtypeStruct) -> bool:
    """Return True if an array of an input has the shape and the kind of dtype that is expected, and as many
    items as the input's first array."""
    wanted_shape = (*np.shape(first)[:1], *expected.shape[1:])
    is_castable = isinstance(x, np.ndarray | jax.Array) and np.can_cast(x.dtype, expected.dtype, "same_kind")
    return is_castable and x.ndim > 0 and x.shape == wanted_shape


def pad_encoder_input(
    encoder: Encoder, encoder_input: Any, rows: Int[np.ndarray, " count"], num_pool_rows: int
) -> tuple[EncoderKey, Int[np.ndarray, " rows"], Any]:
    """Return the bucket of an input, the row of the pool of each of its embeddings, and the input, both
    padded."""
    bucket = choose_bucket(encoder, encoder_input)
    padded_rows = np.full(encoder.num_rows(bucket), num_pool_rows, np.int32)
    padded_rows[: len(rows)] = rows

    def pad_array(x: Any, shape: jax.ShapeDtypeStruct) -> Shaped[np.ndarray, "items *rest"]:
        padded = np.zeros(shape.shape, shape.dtype)
        padded[: len(x)] = x
        return padded

    padded = jax.tree.map(pad_array, encoder_input, encoder.abstract_input(bucket))
    return EncoderKey(bucket), padded_rows, padded
