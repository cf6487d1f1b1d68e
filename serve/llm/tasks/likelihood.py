"""Log-probabilities of given texts (teacher forcing), by ordinary requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ....sampling.params import SamplingParams
from ...text.outputs import Logprob, RequestOutput, require_whole
from ..input_processor import InputProcessor, Prompt, is_one_prompt, listed
from ..session import Make, Session

By = Literal["prefill", "decode"]


@dataclass(frozen=True)
class LogLikelihood:
    """Natural-log probabilities of a text's tokens after its first, or of a continuation's."""

    token_ids: list[int]
    logprobs: list[float]

    @property
    def total(self) -> float:
        return sum(self.logprobs)


def log_likelihood(
    session: Session,
    processor: InputProcessor,
    prompts: Prompt | Sequence[Prompt],
    continuations: str | Sequence[int] | Sequence[str | Sequence[int]] | None,
    by: By,
) -> list[LogLikelihood]:
    """Return log-probabilities of each prompt's tokens after its first, or of its continuation's.

    A prompt is prefilled once for its continuations if they follow each other and prefixes are cached. `by`
    "prefill" computes a text at once. "decode" makes a request of each token of a continuation, and feeds
    those before it one by one: much slower, with the bits that were reported when such tokens were sampled,
    also if prefill's last bits differ. Raises ValueError for an empty prompt, if prompts and continuations
    differ in number, and for "decode" without continuations.
    """
    if by not in ("prefill", "decode") or (by == "decode" and continuations is None):
        raise ValueError(f"by={by!r} is not allowed: 'prefill', or with continuations 'decode'")
    ids = [processor.tokens(prompt)[1] for prompt in listed(prompts)]
    if continuations is None:
        ends, starts = [[] for _ in ids], [1] * len(ids)
    else:
        given: Any = [continuations] if is_one_prompt(continuations) else continuations
        ends, starts = [continuation(processor, c) for c in given], [len(a) for a in ids]
    if len(ends) != len(ids):
        raise ValueError(f"{len(ids)} prompts have {len(ends)} continuations; there must be one for each")
    if 0 in starts:
        raise ValueError("a prompt is empty: its continuation's first token would have no log-probability")
    if by == "decode":
        return decoded(session, processor, ids, ends)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    makes = [
        partial(processor.group, prompt=a + b, params=params, score_from=start, awaited=False)
        for a, b, start in zip(ids, ends, starts, strict=True)
    ]
    found = zip(results(session, processor, makes), starts, strict=True)
    return [of_prompt(result, start) for result, start in found]


def decoded(
    session: Session, processor: InputProcessor, prompts: list[list[int]], ends: list[list[int]]
) -> list[LogLikelihood]:
    """Score continuations: each token is the only one that a request may sample after those before it."""
    makes = [
        partial(processor.group, prompt=a, params=only(b, i), known=[b[:i]], awaited=False)
        for a, b in zip(prompts, ends, strict=True)
        for i in range(len(b))
    ]
    found = results(session, processor, makes)
    last = iter([(result.outputs[0].logprobs or [{}])[-1] for result in found])
    return [LogLikelihood(b, [next(last)[token].logprob for token in b]) for b in ends]


def results(session: Session, processor: InputProcessor, makes: Sequence[Make]) -> list[RequestOutput]:
    """Run requests. Raises RuntimeError if one was aborted."""
    found = [processor.output(group) for group in session.complete(makes)]
    require_whole("log_likelihood", found)
    return found


def only(tokens: list[int], i: int) -> SamplingParams:
    """Return parameters with which only token i of a continuation can be sampled."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=i + 1,
        allowed_token_ids=[tokens[i]],
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )


def continuation(processor: InputProcessor, text: str | Sequence[int]) -> list[int]:
    if not isinstance(text, str):
        return list(text)
    if processor.tokenizer is None:
        raise ValueError(f"{processor.lacking}: give continuations as token ids")
    return processor.tokenizer.encode(text, add_special_tokens=False)


def of_prompt(result: RequestOutput, start: int) -> LogLikelihood:
    """Return the log-probabilities from position `start` on of a result with `prompt_logprobs`."""
    entries: list[dict[int, Logprob] | None] = result.prompt_logprobs or []
    ids = result.prompt_token_ids[start:]
    found = zip(ids, entries[start:], strict=True)
    return LogLikelihood(ids, [entry[token].logprob for token, entry in found if entry])
