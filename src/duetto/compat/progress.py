"""Outputs of a running request by `output_kind`: all tokens so far, the new ones, or only the end."""

from dataclasses import dataclass, replace

from ..sampling.params import RequestOutputKind
from ..serve.llm.subscription import Subscription
from ..serve.text.outputs import CompletionOutput, RequestOutput


@dataclass
class Progress:
    """Tokens of one request that were reported.

    kind: `output_kind` of its sampling parameters.
    num_generated_tokens: tokens of all its completions.
    reported_lengths: tokens and characters of each completion.
    has_ended: the end was reported.
    """

    kind: RequestOutputKind
    num_generated_tokens: int = 0
    reported_lengths: tuple[tuple[int, int], ...] = ()
    has_ended: bool = False

    def take_due_output(self, subscription: Subscription) -> RequestOutput | None:
        """Return the output that is due for a request, and mark it as reported. Returns None if none is
        due."""
        before = self.num_generated_tokens
        self.num_generated_tokens = sum(request.num_output_tokens for request in subscription.requests)
        new = self.kind is not RequestOutputKind.FINAL_ONLY and self.num_generated_tokens > before
        if self.has_ended or not (new or subscription.is_finished):
            return None
        output, self.has_ended = subscription.make_output(), subscription.is_finished
        if self.kind is not RequestOutputKind.DELTA:
            return output
        lengths = self.reported_lengths or ((0, 0),) * len(output.outputs)
        self.reported_lengths = tuple((len(o.token_ids), len(o.text)) for o in output.outputs)
        return replace(output, outputs=list(map(drop_reported_tokens, output.outputs, lengths)))


def drop_reported_tokens(output: CompletionOutput, lengths: tuple[int, int]) -> CompletionOutput:
    """Return a completion without the tokens and characters that were reported before."""
    tokens, characters = lengths
    scores = {name: getattr(output, name) for name in ("logprobs", "logprob_array")}
    return replace(
        output,
        text=output.text[characters:],
        token_ids=output.token_ids[tokens:],
        **{name: None if values is None else values[tokens:] for name, values in scores.items()},
    )
