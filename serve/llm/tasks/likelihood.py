"""Log-probabilities of texts that are given (teacher forcing), through the ordinary requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ....sampling.params import SamplingParams
from ...text.outputs import Logprob, RequestOutput, require_whole
from ..intake import Prompt, is_one_prompt, listed

if TYPE_CHECKING:
    from ..llm import LLM


@dataclass(frozen=True)
class LogLikelihood:
    """Natural-log probabilities of a text's tokens after its first, or of a continuation's."""

    token_ids: list[int]
    logprobs: list[float]

    @property
    def total(self) -> float:
        return sum(self.logprobs)


def log_likelihood(
    llm: "LLM",
    prompts: Prompt | Sequence[Prompt],
    continuations: str | Sequence[int] | Sequence[str | Sequence[int]] | None = None,
    by: Literal["prefill", "decode"] = "prefill",
) -> list[LogLikelihood]:
    """Log-probabilities of each prompt's tokens after its first, or of its continuation's (teacher forcing).

    Continuations of one prompt compute it once, where they stand one after the other and prefixes are cached.
    By prefill a text is read at once. By decode each token of a continuation is a request of its own, in
    which those before it are fed one by one: that takes far longer, and has the very bits that were reported
    when such tokens were sampled, also where prefill's last bits are others. Raises ValueError for an empty
    prompt, where prompts and continuations differ in number, and for decode without continuations.
    """
    if by not in ("prefill", "decode") or (by == "decode" and continuations is None):
        raise ValueError(f"by={by!r} is not allowed: 'prefill', or with continuations 'decode'")
    ids = [llm._intake.tokens(prompt)[1] for prompt in listed(prompts)]
    if continuations is None:
        ends, starts = [[] for _ in ids], [1] * len(ids)
    else:
        given: Any = [continuations] if is_one_prompt(continuations) else continuations
        ends, starts = [continuation(llm, c) for c in given], [len(a) for a in ids]
    if len(ends) != len(ids):
        raise ValueError(f"{len(ids)} prompts have {len(ends)} continuations; there must be one for each")
    if 0 in starts:
        raise ValueError("a prompt is empty: its continuation's first token would have no log-probability")
    if by == "decode":
        return decoded(llm, ids, ends)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    makes = [
        partial(llm._intake.ticket, prompt=a + b, params=params, score_from=start, awaited=False)
        for a, b, start in zip(ids, ends, starts, strict=True)
    ]
    results = llm._finish(llm._session.tickets_of(makes), use_tqdm=False)
    require_whole("log_likelihood", results)
    return [of_prompt(result, start) for result, start in zip(results, starts, strict=True)]


def decoded(llm: "LLM", prompts: list[list[int]], ends: list[list[int]]) -> list[LogLikelihood]:
    """Those of continuations: each token is the only one that a request may sample after those before it."""
    makes = [
        partial(llm._intake.ticket, prompt=a, params=only(b, i), known=[b[:i]], awaited=False)
        for a, b in zip(prompts, ends, strict=True)
        for i in range(len(b))
    ]
    results = llm._finish(llm._session.tickets_of(makes), use_tqdm=False)
    require_whole("log_likelihood", results)
    last = iter([(result.outputs[0].logprobs or [{}])[-1] for result in results])
    return [LogLikelihood(b, [next(last)[token].logprob for token in b]) for b in ends]


def only(tokens: list[int], i: int) -> SamplingParams:
    """Parameters with which token i of a continuation is sampled."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=i + 1,
        allowed_token_ids=[tokens[i]],
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )


def continuation(llm: "LLM", text: str | Sequence[int]) -> list[int]:
    if not isinstance(text, str):
        return list(text)
    if llm.tokenizer is None:
        raise ValueError(f"{llm._intake.lacking}: give continuations as token ids")
    return llm.tokenizer.encode(text, add_special_tokens=False)


def of_prompt(result: RequestOutput, start: int) -> LogLikelihood:
    """That of a prompt's tokens from position `start` on, in a result with `prompt_logprobs`."""
    entries: list[dict[int, Logprob] | None] = result.prompt_logprobs or []
    ids = result.prompt_token_ids[start:]
    found = zip(ids, entries[start:], strict=True)
    return LogLikelihood(ids, [entry[token].logprob for token, entry in found if entry])
