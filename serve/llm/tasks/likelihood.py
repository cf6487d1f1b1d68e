"""Log-probabilities of given texts (teacher forcing), by ordinary requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ....sampling.params import SamplingParams
from ...text.cache_salt import prompt_with_salt, read_prompt_salt
from ...text.outputs import Logprob, RequestOutput, require_complete
from ..input_processor import InputProcessor, PromptInput, is_one_prompt, list_prompts
from ..session import Session
from ..subscription import Subscription

ScoringPass = Literal["prefill", "decode"]


@dataclass(frozen=True)
class LogLikelihood:
    """Natural-log probabilities of the tokens of a continuation, or of a text after its first token."""

    token_ids: list[int]
    logprobs: list[float]

    @property
    def total(self) -> float:
        return sum(self.logprobs)


def log_likelihood(
    session: Session,
    processor: InputProcessor,
    prompts: PromptInput | Sequence[PromptInput],
    continuations: str | Sequence[int] | Sequence[str | Sequence[int]] | None,
    by: ScoringPass,
) -> list[LogLikelihood]:
    """Return log-probabilities of each continuation's tokens, or of each prompt's tokens after its first.

    A prompt is prefilled once for its continuations if they follow each other and prefixes are cached. `by`
    "prefill" computes a text at once. "decode" replays a continuation step by step: slower, with the bits
    that were reported when such tokens were sampled, also if prefill's last bits differ. Raises ValueError
    for an empty prompt, if prompts and continuations differ in number, for a continuation that does not fit,
    and for "decode" without continuations.
    """
    if by not in ("prefill", "decode") or (by == "decode" and continuations is None):
        raise ValueError(f"by={by!r} is not allowed: 'prefill', or with continuations 'decode'")
    ids = [processor.tokenize(prompt)[1] for prompt in list_prompts(prompts)]
    salts = [read_prompt_salt(prompt) for prompt in list_prompts(prompts)]
    if continuations is None:
        suffixes, starts = [[] for _ in ids], [1] * len(ids)
    else:
        texts: Any = [continuations] if is_one_prompt(continuations) else continuations
        suffixes, starts = (
            [encode_continuation(processor, text) for text in texts],
            [len(prompt) for prompt in ids],
        )
    if len(suffixes) != len(ids):
        raise ValueError(f"{len(ids)} prompts have {len(suffixes)} continuations; there must be one for each")
    if 0 in starts:
        raise ValueError("a prompt is empty: its continuation's first token would have no log-probability")
    if by == "decode":
        return score_by_decoding(session, processor, ids, suffixes, salts)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    subscriptions = [
        processor.make_subscription(
            prompt_with_salt(prompt + suffix, salt),
            params,
            score_from=start,
            is_awaited=False,
        )
        for prompt, suffix, salt, start in zip(ids, suffixes, salts, starts, strict=True)
    ]
    outputs = zip(run_scoring_requests(session, subscriptions), starts, strict=True)
    return [prompt_likelihood(output, start) for output, start in outputs]


def score_by_decoding(
    session: Session,
    processor: InputProcessor,
    prompts: list[list[int]],
    suffixes: list[list[int]],
    salts: list[str | None],
) -> list[LogLikelihood]:
    """Score continuations by trace replay. Raises ValueError for a continuation that is too long."""
    subscriptions = [
        processor.make_subscription(
            prompt_with_salt(prompt, salt), make_trace_params(processor, prompt, suffix), is_awaited=False
        )
        for prompt, suffix, salt in zip(prompts, suffixes, salts, strict=True)
        if suffix
    ]
    outputs = iter(run_scoring_requests(session, subscriptions))
    scores = [next(outputs).outputs[0].logprobs or [] if suffix else [] for suffix in suffixes]
    return [
        LogLikelihood(suffix, [entry[token].logprob for token, entry in zip(suffix, entries, strict=True)])
        for suffix, entries in zip(suffixes, scores, strict=True)
    ]


def run_scoring_requests(session: Session, subscriptions: Sequence[Subscription]) -> list[RequestOutput]:
    """Run requests and return their outputs. Raises RuntimeError if a request was aborted."""
    session.submit_and_run(subscriptions)
    outputs = [subscription.make_output() for subscription in subscriptions]
    require_complete("log_likelihood", outputs)
    return outputs


def make_trace_params(processor: InputProcessor, prompt: list[int], tokens: list[int]) -> SamplingParams:
    params = SamplingParams(trace_decode_token_ids=tokens, logprobs=0, detokenize=False)
    room = processor.max_length(prompt, params.replayed()) - len(prompt)
    if room < len(tokens):
        raise ValueError(
            f"a continuation has {len(tokens)} tokens, behind its prompt there is room for {room}"
        )
    return params


def encode_continuation(processor: InputProcessor, text: str | Sequence[int]) -> list[int]:
    if not isinstance(text, str):
        return list(text)
    if processor.tokenizer is None:
        raise ValueError(f"{processor.no_tokenizer_reason}: give continuations as token ids")
    return processor.tokenizer.encode(text, add_special_tokens=False)


def prompt_likelihood(output: RequestOutput, start: int) -> LogLikelihood:
    """Return the log-probabilities from position `start` on of a result with `prompt_logprobs`."""
    entries: list[dict[int, Logprob] | None] = output.prompt_logprobs or []
    ids = output.prompt_token_ids[start:]
    scored = zip(ids, entries[start:], strict=True)
    return LogLikelihood(ids, [entry[token].logprob for token, entry in scored if entry])
