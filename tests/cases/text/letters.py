"""A tokenizer of single bytes."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from duetto.serve.text.tokenizer.tokenizer import Tokenizer


def letters(template: str | None = None, *added: AddedToken) -> Tokenizer:
    """With a chat template, and added tokens behind the bytes."""
    return Tokenizer(backend_of(*added), {}, template)


def backend_of(*added: AddedToken) -> Backend:
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_tokens(list(added))
    return backend
