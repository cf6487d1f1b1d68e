"""A client's running request to a model, and the reader of its outputs."""

import asyncio
import traceback
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ...engine.core.request import Request
from ...llm.mailbox import Mailbox, SlowReaderError
from ...llm.subscription import Subscription
from ...text.openai.tasks import Task
from ...text.outputs import CompletionOutput, GenerationError, RequestOutput
from .errors import HttpError


@dataclass(eq=False)
class ApiCall:
    """A client's running request to a model.

    model: name that it gave
    tasks: one for each prompt
    client: name of the API key that sent it, "" without keys
    mailbox: receives the outputs of all subscriptions
    subscriptions: one for each task
    resumed_outputs: outputs of the tokens that its completions already had from another server
    deadline_timer: timer of the deadline of the first tokens
    """

    model: str
    tasks: Sequence[Task]
    client: str
    mailbox: Mailbox
    subscriptions: list[Subscription] = field(default_factory=list)
    resumed_outputs: list[CompletionOutput] = field(default_factory=list)
    deadline_timer: asyncio.TimerHandle | None = None

    @property
    def requests(self) -> list[Request]:
        """Requests of all subscriptions."""
        return [request for subscription in self.subscriptions for request in subscription.requests]

    @property
    def num_choices(self) -> int:
        """Number of its completions."""
        return len(self.requests)

    @property
    def num_waiting(self) -> int:
        """Number of completions of the prompts without a first token."""
        return sum(len(s.requests) for s in self.subscriptions if not s.has_begun)

    @property
    def usage(self) -> dict[str, int]:
        """Number of prompt tokens, and of prompt tokens that were cached."""
        return {
            "prompt_tokens": sum(len(s.prompt_ids) for s in self.subscriptions),
            "cached_tokens": sum(s.num_cached_tokens for s in self.subscriptions),
        }

    def add(self, subscription: Subscription, position: int) -> None:
        """Add a subscription at a position in the fair queue, before its submission."""
        task, subscription.first_choice = self.tasks[len(self.subscriptions)], self.num_choices
        for request in subscription.requests:
            request.priority, request.prefill_address = position, task.prefill_address
        self.resumed_outputs += subscription.take_outputs()
        self.subscriptions.append(subscription)
        if not subscription.is_at_end:  # else nothing is left to generate
            self.mailbox.unfinished.append(subscription)

    async def read_outputs(self) -> AsyncGenerator[list[CompletionOutput]]:
        """Yield the outputs since the last time; [] after a ping without new ones. Raises HttpError after the
        last output if the request failed."""
        with convert_engine_errors():
            while not self.mailbox.is_at_end:
                outputs = await self.mailbox.get()
                if failed := [output for output in outputs if output.finish_reason == "error"]:
                    if news := drop_errors(outputs):
                        yield news
                    raise make_nan_error(failed[0].stop_reason)
                yield outputs

    async def wait_end(self) -> None:
        """Wait for the end of all completions. Raises HttpError if one failed."""
        with convert_engine_errors():
            await self.mailbox.wait_end()
        for request in self.requests:
            if request.has_failed:
                raise make_nan_error(request.stop_reason)

    def make_results(self) -> list[RequestOutput]:
        """Make the outputs of all tasks so far."""
        return [subscription.make_output() for subscription in self.subscriptions]


def drop_errors(outputs: list[CompletionOutput]) -> list[CompletionOutput]:
    """Return outputs as if no completion had failed; one that is nothing but the failure is left out."""
    has_news = [o for o in outputs if o.finish_reason != "error" or o.text or o.token_ids]
    return [replace(o, finish_reason=None) if o.finish_reason == "error" else o for o in has_news]


def make_nan_error(reason: object) -> HttpError:
    return HttpError(500, str(reason), GenerationError.CODE)


@contextmanager
def convert_engine_errors() -> Iterator[None]:
    """Convert errors of the engine and of its readers to HttpErrors, and print the traceback of unexpected
    ones."""
    try:
        yield
    except HttpError:
        raise
    except SlowReaderError as error:
        raise HttpError(503, str(error), "slow_reader") from None
    except Exception as error:  # noqa: BLE001 - a client gets no traceback
        traceback.print_exception(error)
        raise HttpError(500, "the request has failed", "engine_error") from None
