"""Beam search over log-probabilities: a round generates one token of every beam, whose prefix is cached."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from ....lora.request import Adapters, LoRARequest
from ....sampling.params import BeamSearchParams, SamplingParams
from ...text.outputs import CompletionOutput, Logprob, require_whole
from ..bar import Tqdm, rounds
from ..input_processor import InputProcessor, Prompt, listed, one_each
from ..session import Session


@dataclass
class BeamSearchSequence:
    """A beam."""

    tokens: list[int]  # the prompt's and its own
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # alternatives at each of its own tokens
    cum_logprob: float = 0.0
    text: str | None = None  # of all its tokens, special ones included
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class Search:
    """The search of one prompt: beams that grow, and those with an end token."""

    params: BeamSearchParams
    eos_ids: tuple[int, ...]
    prompt: list[int]
    rounds: int  # tokens that a beam may still get
    beams: list[BeamSearchSequence]
    adapter: LoRARequest | None = None
    ended: list[BeamSearchSequence] = field(default_factory=list)

    def score(self, beam: BeamSearchSequence) -> float:
        """As in vLLM: log-probability over length ** penalty; the prompt counts, an end token does not."""
        length = len(beam.tokens) - (beam.tokens[-1] in self.eos_ids)
        return beam.cum_logprob / max(length, 1) ** self.params.length_penalty

    def grow(self, results: Sequence[CompletionOutput]) -> None:
        """Replace each beam by its continuations, one result for each, and keep the best of all."""
        grown = []
        for beam, result in zip(self.beams, results, strict=True):
            for new in continuations(beam, result):
                ends = not self.params.ignore_eos and new.tokens[-1] in self.eos_ids
                (self.ended if ends else grown).append(new)
        self.beams, self.rounds = self.best(grown), self.rounds - 1

    def best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=self.score, reverse=True)[: self.params.beam_width]

    @property
    def growing(self) -> bool:
        return bool(self.beams) and self.rounds > 0

    def sequences(self) -> list[BeamSearchSequence]:
        """The best of the ended beams and of those that could not continue."""
        for beams, reason in ((self.ended, "stop"), (self.beams, "length")):
            for beam in beams:
                beam.finish_reason = reason
        return self.best(self.ended + self.beams)


def continuations(beam: BeamSearchSequence, result: CompletionOutput) -> Iterator[BeamSearchSequence]:
    """A beam extended by each alternative for its next token."""
    (alternatives,) = result.logprobs or [{}]
    for token, found in alternatives.items():
        yield BeamSearchSequence(
            [*beam.tokens, token], [*beam.logprobs, alternatives], beam.cum_logprob + found.logprob
        )


def search(
    session: Session,
    processor: InputProcessor,
    prompts: Prompt | Sequence[Prompt],
    params: BeamSearchParams,
    use_tqdm: Tqdm,
    concurrency_limit: int | None,
    lora_request: Adapters,
) -> list[BeamSearchOutput]:
    """Search beams of each prompt, as `LLM.beam_search` describes."""
    if concurrency_limit is not None and concurrency_limit < 1:
        raise ValueError(f"concurrency_limit={concurrency_limit!r} is not allowed: 1 or more, or None")
    texts = listed(prompts)
    adapters = one_each("lora_requests", lora_request, len(texts))
    searches = [begun(processor, *one, params) for one in zip(texts, adapters, strict=True)]
    token = one_token(params, processor.options.max_logprobs, processor.vocab_size)
    at_once = concurrency_limit or max(len(searches), 1)
    for first in range(0, len(searches), at_once):
        run(session, processor, searches[first : first + at_once], token, use_tqdm)
    return [BeamSearchOutput([with_text(processor, beam) for beam in s.sequences()]) for s in searches]


def begun(
    processor: InputProcessor, prompt: Prompt, adapter: LoRARequest | None, params: BeamSearchParams
) -> Search:
    """Return a prompt's search. Raises ValueError or TypeError for a prompt that `generate` would refuse."""
    limit = SamplingParams(temperature=0.0, max_tokens=params.max_tokens)
    _, tokens = processor.tokens(prompt)
    processor.check(tokens, limit)
    rounds = processor.end(tokens, limit) - len(tokens)
    return Search(params, processor.eos_ids, tokens, rounds, [BeamSearchSequence(tokens)], adapter)


def one_token(params: BeamSearchParams, most: int, V: int) -> SamplingParams:
    """Sampling parameters of a round. `most` is the engine's `max_logprobs`.

    A round has twice as many alternatives as beams: if the best of each beam is an end token, enough beams
    continue. Log-probabilities are those of the raw logits: as in vLLM, the temperature has no effect.
    """
    wanted = min(2 * params.beam_width, V)
    found = SamplingParams(temperature=0.0, max_tokens=1, logprobs=wanted, detokenize=False)
    try:
        found.check_logprobs(most, V)
        return found
    except ValueError as error:
        raise ValueError(
            f"beam_width={params.beam_width} needs {wanted} log-probabilities: {error}"
        ) from None


def run(
    session: Session,
    processor: InputProcessor,
    searches: list[Search],
    params: SamplingParams,
    use_tqdm: Tqdm,
) -> None:
    """Run rounds over all beams of all searches, until none grows."""
    for _ in rounds(max(search.rounds for search in searches), use_tqdm):
        if not (growing := [search for search in searches if search.growing]):
            break
        make = partial(partial, processor.group, params=params)
        makes = [
            make(prompt=beam.tokens, written=len(beam.logprobs), lora_request=search.adapter)
            for search in growing
            for beam in search.beams
        ]
        found = [processor.output(group) for group in session.complete(makes)]
        require_whole("beam_search", found)
        results = iter(found)
        for search in growing:
            search.grow([next(results).outputs[0] for _ in search.beams])


def with_text(processor: InputProcessor, beam: BeamSearchSequence) -> BeamSearchSequence:
    if processor.tokenizer is not None:
        beam.text = processor.tokenizer.decode(beam.tokens, skip_special_tokens=False)
    return beam
