"""The bar while requests run: how many are done, and the tokens per second read and written, as vLLM's."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .ticket import RequestGroup

# whether a bar is shown, or what makes one, such as partial(tqdm, leave=False)
Tqdm = bool | Callable[..., Any]


@contextmanager
def progress(total: int, use_tqdm: Tqdm) -> Iterator[Callable[[list[RequestGroup]], None]]:
    """A bar of `total` tickets; yields what is to be told of those that have ended."""
    if not use_tqdm:
        yield lambda done: None
        return
    began, read, written = time.monotonic(), 0, 0
    with bar_of(use_tqdm)(
        total=total, desc="Processed prompts", dynamic_ncols=True, postfix=speeds(0, 0, 1)
    ) as bar:

        def advance(done: list[RequestGroup]) -> None:
            nonlocal read, written
            requests = [request for ticket in done for request in ticket.requests]
            read += sum(len(request.prompt) for request in requests)
            written += sum(request.generated for request in requests)
            if done:
                bar.postfix = speeds(read, written, time.monotonic() - began)
                bar.update(len(done))

        yield advance
        bar.refresh()  # the last speeds, however soon they followed those before


def rounds(most: int, use_tqdm: Tqdm) -> Iterable[int]:
    """`range(most)`, with a bar of the tokens that a search may take."""
    if not use_tqdm:
        return range(most)
    return bar_of(use_tqdm)(range(most), desc="Beam search", unit="token")


def bar_of(use_tqdm: Tqdm) -> Callable[..., Any]:
    from tqdm.auto import tqdm

    return use_tqdm if callable(use_tqdm) else tqdm


def speeds(read: int, written: int, seconds: float) -> str:
    rates = (tokens / max(seconds, 1e-9) for tokens in (read, written))
    return "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*rates)
