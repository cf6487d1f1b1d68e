"""Progress bar of requests, as in vLLM: their number, and tokens per second read and written."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .subscription import Subscription

# whether a bar is shown, or a function that makes one, such as partial(tqdm, leave=False)
Tqdm = bool | Callable[..., Any]


@contextmanager
def show_progress(total: int, use_tqdm: Tqdm) -> Iterator[Callable[[list[Subscription]], None]]:
    """Show a bar of `total` prompts. Yields a function that advances the bar by a list of ended ones."""
    if not use_tqdm:
        yield lambda ended: None
        return
    start_time, read, written = time.monotonic(), 0, 0
    with bar_factory(use_tqdm)(
        total=total, desc="Processed prompts", dynamic_ncols=True, postfix=format_speeds(0, 0, 1)
    ) as bar:

        def advance(ended: list[Subscription]) -> None:
            nonlocal read, written
            requests = [request for subscription in ended for request in subscription.requests]
            read += sum(len(request.prompt) for request in requests)
            written += sum(request.num_output_tokens for request in requests)
            if ended:
                bar.postfix = format_speeds(read, written, time.monotonic() - start_time)
                bar.update(len(ended))

        yield advance
        bar.refresh()  # the bar itself skips updates that follow soon after another


def iterate_beam_rounds(num_rounds: int, use_tqdm: Tqdm) -> Iterable[int]:
    """Return `range(num_rounds)`, shown as a bar. A round of a beam search generates a token of each beam."""
    if not use_tqdm:
        return range(num_rounds)
    return bar_factory(use_tqdm)(range(num_rounds), desc="Beam search", unit="token")


def bar_factory(use_tqdm: Tqdm) -> Callable[..., Any]:
    from tqdm.auto import tqdm

    return use_tqdm if callable(use_tqdm) else tqdm


def format_speeds(read: int, written: int, seconds: float) -> str:
    rates = (tokens / max(seconds, 1e-9) for tokens in (read, written))
    return "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*rates)
