"""A caller's subscription to the `n` completions of its prompt, and a watcher of subscriptions that end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...checkpoints.adapters.adapter import Adapter
from ...lora.request import LoRARequest
from ..engine.core.output_processor import OutputProcessor
from ..engine.core.request import Request
from ..text.outputs import CompletionOutput, RequestOutput


@dataclass(eq=False)
class Subscription:
    """`n` requests over one prompt, all with the subscription's id, and what its caller has read of them.

    requests: one for each completion
    prompt: text, if it was text
    lora_request: adapter that its outputs name
    output_processor: makes its outputs
    first_choice: index of its first completion among the caller's
    id: id of the requests, set by `Session.assign_ids`
    is_submitted: True once the engine has the requests
    """

    requests: list[Request]
    prompt: str | None = None
    lora_request: LoRARequest | None = None
    output_processor: OutputProcessor = field(default_factory=OutputProcessor)
    first_choice: int = 0
    id: str = ""
    is_submitted: bool = False

    def __post_init__(self):
        # number of tokens and of pieces of text that were read, of each completion not read to its end
        self._read_counts: dict[int, tuple[int, int]] = dict.fromkeys(range(len(self.requests)), (0, 0))

    @property
    def prompt_ids(self) -> list[int]:
        return self.requests[0].prompt

    @property
    def adapter(self) -> Adapter | None:
        return self.requests[0].adapter

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that were cached."""
        return self.requests[0].num_cached_tokens

    @property
    def has_begun(self) -> bool:
        """True if a completion has a token of this engine, or all have ended."""
        return self.is_finished or any(r.num_output_tokens > r.num_resumed_tokens for r in self.requests)

    @property
    def is_finished(self) -> bool:
        return all(request.is_finished for request in self.requests)

    @property
    def is_at_end(self) -> bool:
        """True if all completions were read to their end."""
        return not self._read_counts

    @property
    def num_unread_tokens(self) -> int:
        """Number of generated tokens that were not read."""
        return sum(
            self.requests[index].num_output_tokens - num_read
            for index, (num_read, _) in self._read_counts.items()
        )

    def take_outputs(self) -> list[CompletionOutput]:
        """Return the new text, tokens and log-probabilities of each completion since the last call. The last
        output of a completion has its finish reason."""
        outputs = []
        for index, (num_tokens, num_pieces) in list(self._read_counts.items()):
            request = self.requests[index]
            tokens = request.tokens[len(request.prompt) + num_tokens :]
            text, num_pieces = request.detokenizer.text_after(num_pieces) if request.detokenizer else ("", 0)
            if tokens or text or request.is_finished:
                choice = self.first_choice + index
                make_output = self.output_processor.make_new_completion
                outputs.append(make_output(choice, request, text, tokens, num_tokens))
            self._read_counts[index] = num_tokens + len(tokens), num_pieces
            if request.is_finished:
                del self._read_counts[index]
        return outputs

    def make_output(self) -> RequestOutput:
        """Make the output of all completions so far."""
        first, finished = self.requests[0], self.is_finished
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=first.prompt,
            outputs=[self.output_processor.make_completion(i, r) for i, r in enumerate(self.requests)],
            prompt_logprobs=self.output_processor.make_prompt_logprobs(first),
            finished=finished,
            metrics=first.metrics() if finished else None,
            num_cached_tokens=first.num_cached_tokens,
            lora_request=self.lora_request,
        )


class CompletionWatcher:
    """Subscriptions whose end a caller waits for.

    unfinished: subscriptions that run, by id
    ended: subscriptions that have ended and were not taken, by id, in the order of their ends
    """

    def __init__(self, subscriptions: Sequence[Subscription]):
        self.unfinished = {s.id: s for s in subscriptions if not s.is_finished}
        self.ended = {s.id: s for s in subscriptions if s.is_finished}

    @property
    def is_at_end(self) -> bool:
        return not (self.unfinished or self.ended)

    def on_end(self, subscription: Subscription) -> None:
        """Note that a subscription has ended."""
        if self.unfinished.get(subscription.id) is subscription:
            self.ended[subscription.id] = self.unfinished.pop(subscription.id)

    def take(self) -> list[Subscription]:
        """Return the subscriptions that have ended since the last call."""
        ended, self.ended = self.ended, {}
        return list(ended.values())

    def forget(self, id: str) -> None:
        self.unfinished.pop(id, None)
        self.ended.pop(id, None)
