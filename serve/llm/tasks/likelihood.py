"""Log-probabilities of given texts (teacher forcing), by ordinary requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ....model.weights.cpu.panels import Packed
from ....sampling.params import SamplingParams
from ...engine.core.engine import Engine
from ...text.cache_salt import prompt_with_salt, read_prompt_salt
from ...text.outputs import Logprob, RequestOutput, require_complete
from ..input_processor import InputProcessor, PromptInput, is_one_prompt, list_prompts
from ..session import Session
from ..subscription import Subscription

ScoringPass = Literal["prefill", "decode"]
ScoringChoice = ScoringPass | Literal["exact"]


@dataclass(frozen=True)
class LogLikelihood:
    """Natural-log probabilities of the tokens of a continuation, or of a text after its first token.

    by: steps that computed them.
    """

    token_ids: list[int]
    logprobs: list[float]
    by: ScoringPass

    @property
    def total(self) -> float:
        return sum(self.logprobs)


def log_likelihood(
    session: Session,
    processor: InputProcessor,
    prompts: PromptInput | Sequence[PromptInput],
    continuations: str | Sequence[int] | Sequence[str | Sequence[int]] | None,
    by: ScoringChoice,
) -> list[LogLikelihood]:
    """Return log-probabilities of each continuation's tokens, or of each prompt's tokens after its first.

    A prompt is prefilled once for its continuations if they follow each other and prefixes are cached. `by`
    "prefill" computes a text at once. "decode" replays a continuation, or a prompt behind its first token,
    step by step: slower, with the bits that were reported when such tokens were sampled, also if prefill's
    last bits differ. "exact" is "prefill" if prefill has the bits of decode (`has_exact_prefill`), else
    "decode"; the result's `by` says which. Raises ValueError for an empty prompt, if prompts and
    continuations differ in number, for a continuation that does not fit, and for "exact" without the
    reproducibility contract (`reproducible=False`).
    """
    by = choose_scoring_pass(session, processor.options.reproducible, by)
    ids = [processor.tokenize(prompt)[1] for prompt in list_prompts(prompts)]
    salts = [read_prompt_salt(prompt) for prompt in list_prompts(prompts)]
    if continuations is None and by == "prefill":
        suffixes, starts = [[] for _ in ids], [1] * len(ids)
    else:
        ids, suffixes = split_texts(processor, ids, continuations)
        starts = [len(prompt) for prompt in ids]
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


def split_texts(
    processor: InputProcessor, ids: list[list[int]], continuations: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Split texts into tokens that are given, and tokens that are scored: the continuations, or the prompts
    behind their first token if there are no continuations."""
    if continuations is None:
        return [prompt[:1] for prompt in ids], [prompt[1:] for prompt in ids]
    texts = [continuations] if is_one_prompt(continuations) else continuations
    return ids, [encode_continuation(processor, text) for text in texts]


def choose_scoring_pass(session: Session, is_reproducible: bool, by: ScoringChoice) -> ScoringPass:
    """Return the steps that score as `by` says. Raises ValueError like `log_likelihood`."""
    if by not in ("prefill", "decode", "exact"):
        raise ValueError(f"by={by!r} is not allowed: 'prefill', 'decode' or 'exact'")
    if by != "exact":
        return by
    if not is_reproducible:
        raise ValueError("by='exact' is not allowed with reproducible=False: bits then depend on the batch")
    with session.hold_engine():
        return "prefill" if has_exact_prefill(session.engine) else "decode"


def has_exact_prefill(engine: Engine) -> bool:
    """Return True if prefill scores a prompt's tokens with the bits of decode.

    The warm-up compares keys and values of the two, not the logits of a prompt, which are of another number
    of rows. So CPU kernels must multiply the output matrix, whose products depend on no other row, and what
    XLA computes of a logit must be its normalisation alone, no soft cap, scale or bias.
    """
    config, head = engine.config.target, engine.params.head
    is_plain = config.logit_softcap is None and config.logit_scale == 1.0 and not config.head_bias
    return engine.warmup is None and engine.classes.same_bits and isinstance(head, Packed) and is_plain


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
        LogLikelihood(
            suffix, [entry[token].logprob for token, entry in zip(suffix, entries, strict=True)], "decode"
        )
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
    return LogLikelihood(ids, [entry[token].logprob for token, entry in scored if entry], "prefill")
