"""Reports of a running request: all tokens so far, the new ones, or only the end."""

from dataclasses import dataclass, replace

from ..sampling.params import RequestOutputKind
from ..serve.llm.input_processor import InputProcessor
from ..serve.llm.request_group import RequestGroup
from ..serve.text.outputs import CompletionOutput, RequestOutput


@dataclass
class Progress:
    """Tokens of one request that were reported. `kind` is its sampling parameters' `output_kind`."""

    kind: RequestOutputKind
    generated: int = 0  # tokens of all its completions
    places: tuple[tuple[int, int], ...] = ()  # tokens and characters of each
    ended: bool = False

    def take(self, group: RequestGroup, processor: InputProcessor) -> RequestOutput | None:
        """The report that is due for a request as it stands, None where there is none; its end is reported
        once."""
        before = self.generated
        self.generated = sum(request.generated for request in group.requests)
        new = self.kind is not RequestOutputKind.FINAL_ONLY and self.generated > before
        if self.ended or not (new or group.finished):
            return None
        output, self.ended = processor.output(group), group.finished
        if self.kind is not RequestOutputKind.DELTA:
            return output
        places = self.places or ((0, 0),) * len(output.outputs)
        self.places = tuple((len(o.token_ids), len(o.text)) for o in output.outputs)
        return replace(output, outputs=list(map(since, output.outputs, places)))


def since(output: CompletionOutput, place: tuple[int, int]) -> CompletionOutput:
    """Return a completion without its first tokens and characters."""
    tokens, characters = place
    logprobs = None if output.logprobs is None else output.logprobs[tokens:]
    return replace(
        output, text=output.text[characters:], token_ids=output.token_ids[tokens:], logprobs=logprobs
    )
