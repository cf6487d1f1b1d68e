"""Progress bar of requests: the number done, and tokens per second read and written, as vLLM's."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .request_group import RequestGroup

# a bar is shown, or a function that makes one, such as partial(tqdm, leave=False)
Tqdm = bool | Callable[..., Any]


@contextmanager
def progress(total: int, use_tqdm: Tqdm) -> Iterator[Callable[[list[RequestGroup]], None]]:
    """Show a bar of `total` groups; yield the function that advances it by groups that have ended."""
    if not use_tqdm:
        yield lambda ended: None
        return
    began, read, written = time.monotonic(), 0, 0
    with bar_of(use_tqdm)(
        total=total, desc="Processed prompts", dynamic_ncols=True, postfix=speeds(0, 0, 1)
    ) as bar:

        def advance(ended: list[RequestGroup]) -> None:
            nonlocal read, written
            requests = [request for group in ended for request in group.requests]
            read += sum(len(request.prompt) for request in requests)
            written += sum(request.generated for request in requests)
            if ended:
                bar.postfix = speeds(read, written, time.monotonic() - began)
                bar.update(len(ended))

        yield advance
        bar.refresh()  # the bar itself skips updates that follow soon after another


def rounds(most: int, use_tqdm: Tqdm) -> Iterable[int]:
    """Return `range(most)` with a bar: a round of a beam search is a token."""
    if not use_tqdm:
        return range(most)
    return bar_of(use_tqdm)(range(most), desc="Beam search", unit="token")


def bar_of(use_tqdm: Tqdm) -> Callable[..., Any]:
    from tqdm.auto import tqdm

    return use_tqdm if callable(use_tqdm) else tqdm


def speeds(read: int, written: int, seconds: float) -> str:
    rates = (tokens / max(seconds, 1e-9) for tokens in (read, written))
    return "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*rates)
