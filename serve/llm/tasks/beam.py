"""Beam search over log-probabilities: a round asks one token of every beam, whose pages are found by name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ....lora.request import Adapters, LoRARequest
from ....sampling.params import BeamSearchParams, SamplingParams
from ...text.outputs import CompletionOutput, Logprob, require_whole
from ..bar import Tqdm, rounds
from ..intake import Prompt, listed, one_each

if TYPE_CHECKING:
    from ..llm import LLM


@dataclass
class BeamSearchSequence:
    """A beam: the prompt's tokens and its own, the alternatives at each of its own, and its log-probability.

    `text` is that of all its tokens, special ones too.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class Search:
    """One prompt's search: beams that grow, and those that have ended."""

    params: BeamSearchParams
    eos_ids: tuple[int, ...]
    prompt: list[int]
    rounds: int  # tokens that a beam may get
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
    llm: "LLM",
    prompts: Prompt | Sequence[Prompt],
    params: BeamSearchParams,
    use_tqdm: Tqdm = False,
    concurrency_limit: int | None = None,
    lora_request: Adapters = None,
) -> list[BeamSearchOutput]:
    """`LLM.beam_search`."""
    if concurrency_limit is not None and concurrency_limit < 1:
        raise ValueError(f"concurrency_limit={concurrency_limit!r} is not allowed: 1 or more, or None")
    texts = listed(prompts)
    adapters = one_each("lora_requests", lora_request, len(texts))
    searches = [begun(llm, *one, params) for one in zip(texts, adapters, strict=True)]
    asked = one_token(params, llm.options.max_logprobs, llm.config.vocab_size)
    at_once = concurrency_limit or max(len(searches), 1)
    for first in range(0, len(searches), at_once):
        run(llm, searches[first : first + at_once], asked, use_tqdm)
    return [BeamSearchOutput([with_text(llm, beam) for beam in s.sequences()]) for s in searches]


def begun(llm: "LLM", prompt: Prompt, adapter: LoRARequest | None, params: BeamSearchParams) -> Search:
    """A prompt's search. Raises ValueError or TypeError for a prompt that `generate` would refuse."""
    limit = SamplingParams(temperature=0.0, max_tokens=params.max_tokens)
    _, tokens = llm._intake.tokens(prompt)
    llm._intake.check(tokens, limit)
    rounds = llm._intake.end(tokens, limit) - len(tokens)
    return Search(params, llm._intake.eos_ids, tokens, rounds, [BeamSearchSequence(tokens)], adapter)


def one_token(params: BeamSearchParams, most: int, V: int) -> SamplingParams:
    """Twice as many alternatives as beams: were each best one an end, enough would go on. The engine reports
    `most`.

    Log-probabilities are those of the raw logits: as in vLLM, the temperature has no part in the search.
    """
    wanted = min(2 * params.beam_width, V)
    asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=wanted, detokenize=False)
    try:
        asked.check_logprobs(most, V)
        return asked
    except ValueError as error:
        raise ValueError(
            f"beam_width={params.beam_width} needs {wanted} log-probabilities: {error}"
        ) from None


def run(llm: "LLM", searches: list[Search], params: SamplingParams, use_tqdm: Tqdm) -> None:
    """Rounds over all beams of all searches, until none grows."""
    for _ in rounds(max(search.rounds for search in searches), use_tqdm):
        if not (growing := [search for search in searches if search.growing]):
            break
        beams = [(search, beam) for search in growing for beam in search.beams]
        makes = [
            partial(
                llm._intake.ticket,
                prompt=beam.tokens,
                params=params,
                written=len(beam.logprobs),
                lora_request=search.adapter,
            )
            for search, beam in beams
        ]
        found = llm._finish(llm._session.tickets_of(makes), use_tqdm=False)
        require_whole("beam_search", found)
        results = iter(found)
        for search in growing:
            search.grow([next(results).outputs[0] for _ in search.beams])


def with_text(llm: "LLM", beam: BeamSearchSequence) -> BeamSearchSequence:
    if llm.tokenizer is not None:
        beam.text = llm.tokenizer.decode(beam.tokens, skip_special_tokens=False)
    return beam
