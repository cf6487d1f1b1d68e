"""Beam search over log-probabilities. A round generates one token of every beam; prefixes are cached."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ....lora.request import LoRARequest, LoRARequests
from ....sampling.params import BeamSearchParams, SamplingParams
from ...text.cache_salt import prompt_with_salt, read_prompt_salt
from ...text.outputs import CompletionOutput, Logprob, require_complete
from ..input_processor import InputProcessor, PromptInput, broadcast_over_prompts, list_prompts
from ..progress_bar import Tqdm, iterate_beam_rounds
from ..session import Session


@dataclass
class BeamSearchSequence:
    """A beam."""

    tokens: list[int]  # prompt and generated tokens
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # alternatives at each generated token
    cum_logprob: float = 0.0
    text: str | None = None  # of all its tokens, special ones included
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class BeamSearchInstance:
    """The search of one prompt: growing beams, and ended beams."""

    params: BeamSearchParams
    eos_ids: tuple[int, ...]
    prompt: list[int]
    rounds_left: int  # tokens that a beam may still get
    beams: list[BeamSearchSequence]
    adapter: LoRARequest | None = None
    salt: str | None = None  # cache salt of the prompt
    ended: list[BeamSearchSequence] = field(default_factory=list)  # beams with an end token

    def beam_score(self, beam: BeamSearchSequence) -> float:
        """Return log-probability / length ** penalty, as vLLM does. The length includes the prompt, but no
        end token."""
        length = len(beam.tokens) - (beam.tokens[-1] in self.eos_ids)
        return beam.cum_logprob / max(length, 1) ** self.params.length_penalty

    def grow(self, outputs: Sequence[CompletionOutput]) -> None:
        """Extend each beam by the alternatives in its result, and keep the `beam_width` best of all."""
        grown = []
        for beam, output in zip(self.beams, outputs, strict=True):
            for extended in extend_beam(beam, output):
                is_ended = not self.params.ignore_eos and extended.tokens[-1] in self.eos_ids
                (self.ended if is_ended else grown).append(extended)
        self.beams, self.rounds_left = self.best_beams(grown), self.rounds_left - 1

    def best_beams(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=self.beam_score, reverse=True)[: self.params.beam_width]

    @property
    def can_grow(self) -> bool:
        return bool(self.beams) and self.rounds_left > 0

    def finish_beams(self) -> list[BeamSearchSequence]:
        """Set each beam's finish reason, and return the best beams, ended or at their length limit."""
        for beams, reason in ((self.ended, "stop"), (self.beams, "length")):
            for beam in beams:
                beam.finish_reason = reason
        return self.best_beams(self.ended + self.beams)


def extend_beam(beam: BeamSearchSequence, output: CompletionOutput) -> Iterator[BeamSearchSequence]:
    """Yield a copy of the beam for each alternative of its next token."""
    (alternatives,) = output.logprobs or [{}]
    for token, logprob in alternatives.items():
        yield BeamSearchSequence(
            [*beam.tokens, token], [*beam.logprobs, alternatives], beam.cum_logprob + logprob.logprob
        )


def search_beams(
    session: Session,
    processor: InputProcessor,
    prompts: PromptInput | Sequence[PromptInput],
    params: BeamSearchParams,
    use_tqdm: Tqdm,
    concurrency_limit: int | None,
    adapters: LoRARequests,
) -> list[BeamSearchOutput]:
    """Search the beams of each prompt; see `LLM.beam_search`."""
    if concurrency_limit is not None and concurrency_limit < 1:
        raise ValueError(f"concurrency_limit={concurrency_limit!r} is not allowed: 1 or more, or None")
    texts = list_prompts(prompts)
    prompt_adapters = broadcast_over_prompts("lora_requests", adapters, len(texts))
    searches = [
        begin_search(processor, text, adapter, params)
        for text, adapter in zip(texts, prompt_adapters, strict=True)
    ]
    token_params = make_round_params(params, processor.options.max_logprobs, processor.vocab_size)
    num_at_once = concurrency_limit or max(len(searches), 1)
    for first in range(0, len(searches), num_at_once):
        run_rounds(session, processor, searches[first : first + num_at_once], token_params, use_tqdm)
    return [BeamSearchOutput([set_beam_text(processor, beam) for beam in s.finish_beams()]) for s in searches]


def begin_search(
    processor: InputProcessor, prompt: PromptInput, adapter: LoRARequest | None, params: BeamSearchParams
) -> BeamSearchInstance:
    """Start the search of a prompt. Raises ValueError or TypeError for a prompt that `generate` refuses."""
    limit_params = SamplingParams(temperature=0.0, max_tokens=params.max_tokens)
    _, tokens = processor.tokenize(prompt)
    processor.check_prompt(tokens, limit_params)
    num_rounds = processor.max_length(tokens, limit_params) - len(tokens)
    beams, salt = [BeamSearchSequence(tokens)], read_prompt_salt(prompt)
    return BeamSearchInstance(params, processor.eos_ids, tokens, num_rounds, beams, adapter, salt)


def make_round_params(params: BeamSearchParams, max_logprobs: int, V: int) -> SamplingParams:
    """Return the sampling parameters of a round. `max_logprobs` is the engine's, `V` the vocabulary's size.

    A round has twice as many alternatives as beams: if the best of each beam is an end token, enough beams
    continue. Log-probabilities are of the raw logits: as in vLLM, the temperature has no effect.
    """
    num_logprobs = min(2 * params.beam_width, V)
    token_params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=num_logprobs, detokenize=False)
    try:
        token_params.check_logprobs(max_logprobs, V)
        return token_params
    except ValueError as error:
        raise ValueError(
            f"beam_width={params.beam_width} needs {num_logprobs} log-probabilities: {error}"
        ) from None


def run_rounds(
    session: Session,
    processor: InputProcessor,
    searches: list[BeamSearchInstance],
    params: SamplingParams,
    use_tqdm: Tqdm,
) -> None:
    """Run rounds over all beams of all searches, until no search grows."""
    for _ in iterate_beam_rounds(max(search.rounds_left for search in searches), use_tqdm):
        if not (active := [search for search in searches if search.can_grow]):
            break
        subscriptions = [
            processor.make_subscription(
                prompt_with_salt(beam.tokens, search.salt),
                params,
                num_output_ids=len(beam.logprobs),
                lora_request=search.adapter,
            )
            for search in active
            for beam in search.beams
        ]
        session.submit_and_run(subscriptions)
        outputs = [subscription.make_output() for subscription in subscriptions]
        require_complete("beam_search", outputs)
        next_outputs = iter(outputs)
        for search in active:
            search.grow([next(next_outputs).outputs[0] for _ in search.beams])


def set_beam_text(processor: InputProcessor, beam: BeamSearchSequence) -> BeamSearchSequence:
    if processor.tokenizer is not None:
        beam.text = processor.tokenizer.decode(beam.tokens, skip_special_tokens=False)
    return beam
