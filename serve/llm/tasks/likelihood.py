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
    "prefill" computes a text at once. "decode" replays a continuation step by step: slower, with the bits
    that were reported when such tokens were sampled, also if prefill's last bits differ. Raises ValueError
    for an empty prompt, if prompts and continuations differ in number, for a continuation that does not fit,
    and for "decode" without continuations.
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
    """Score continuations by trace replay. Raises ValueError for one that does not fit behind its prompt."""
    makes = [
        partial(processor.group, prompt=a, params=traced(processor, a, b), awaited=False)
        for a, b in zip(prompts, ends, strict=True)
        if b
    ]
    found = iter(results(session, processor, makes))
    scores = [next(found).outputs[0].logprobs or [] if b else [] for b in ends]
    return [
        LogLikelihood(b, [at[token].logprob for token, at in zip(b, score, strict=True)])
        for b, score in zip(ends, scores, strict=True)
    ]


def results(session: Session, processor: InputProcessor, makes: Sequence[Make]) -> list[RequestOutput]:
    """Run requests. Raises RuntimeError if one was aborted."""
    found = [processor.output(group) for group in session.complete(makes)]
    require_whole("log_likelihood", found)
    return found


def traced(processor: InputProcessor, prompt: list[int], tokens: list[int]) -> SamplingParams:
    params = SamplingParams(trace_decode_token_ids=tokens, logprobs=0, detokenize=False)
    room = processor.end(prompt, params.replayed()) - len(prompt)
    if room < len(tokens):
        raise ValueError(
            f"a continuation has {len(tokens)} tokens, behind its prompt there is room for {room}"
        )
    return params


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
