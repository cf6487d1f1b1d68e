"""Clients of the simulated fleet, and the verdict on what they were answered."""

import asyncio
import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.chaos.machine import Violation
from benchmarks.chaos.server import EOS, allowed
from benchmarks.chaos.simulated.device import Oracle, token_after
from benchmarks.chaos.simulated.world import SimulatedLoop
from duetto.sampling.params import fold_seed
from duetto.serve.server.router.proxy import Proxy
from duetto.serve.server.service.errors import HttpError

PATH = "/v1/completions"


class Verdict(enum.Enum):
    WHOLE, FAILED, LEFT = range(3)


@dataclass(frozen=True)
class Asked:
    """A request of a client. `grammar`: tokens of its constraint; `leaves`: seconds after which the client
    disconnects."""

    number: int
    client: str
    at: float
    prompt: list[int]
    most: int
    seed: int
    n: int = 1
    stream: bool = True
    ignores_end: bool = False
    grammar: int | None = None
    leaves: float | None = None

    @property
    def cost(self) -> int:
        return len(self.prompt) + self.n * self.most

    @property
    def body(self) -> bytes:
        fields: dict[str, Any] = {"prompt": self.prompt, "max_tokens": self.most, "seed": self.seed}
        fields |= {"n": self.n, "stream": self.stream, "ignore_eos": self.ignores_end, "temperature": 1.0}
        if self.grammar is not None:
            fields["structured_outputs"] = {"regex": str(self.grammar)}
        return msgspec.json.encode(fields | {"return_token_ids": True})


class Client:
    """Sends one request, and reads its answer."""

    def __init__(self, loop: SimulatedLoop, proxy: Proxy, ask: Asked, on_end: Callable[[Asked], None]):
        self.loop, self.proxy, self.ask, self._on_end = loop, proxy, ask, on_end
        self.status, self.data = 0, b""
        self.error, self.code = "", ""  # of an answer that failed
        self.is_over = self.has_left = False
        self.begun = ask.at
        self.ended: float | None = None

    async def run(self) -> None:
        await asyncio.sleep(self.ask.at)
        self.begun = self.loop.time()
        scope = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"",
        }
        scope |= {"headers": [(b"content-type", b"application/json")], "client_name": self.ask.client}
        messages = [{"type": "http.request", "body": self.ask.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.sleep(1e9 if self.ask.leaves is None else self.ask.leaves)
            self.has_left = True
            self._on_end(self.ask)
            return {"type": "http.disconnect"}

        try:
            await self.proxy(scope, receive, self._send)
        except HttpError as error:
            if self.status:
                raise Violation(f"request {self.ask.number} was answered twice") from error
            self._fail(error.body)
        self._on_end(self.ask)
        self.ended = self.loop.time()

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            if self.status:
                raise Violation(f"request {self.ask.number} was answered twice")
            self.status = message["status"]
            return
        if self.is_over or not self.status:
            raise Violation(f"request {self.ask.number} got a piece behind the end of its answer")
        self.data += message.get("body", b"")
        self.is_over = not message.get("more_body")

    # ------------------------------------------------------------ the verdict

    def verdict(self, oracle: Oracle, weights: Iterable[int]) -> Verdict:
        """Compare the answer with those of one of the `weights`. Raises Violation for a wrong token, one that
        stands twice, and an answer that is whole but not all."""
        outputs, ends, is_whole = self._read()
        answers = ([self._wanted(oracle, number, i) for i in range(self.ask.n)] for number in weights)
        if not any(self._fits(outputs, answer, is_whole) for answer in answers):
            raise Violation(f"request {self.ask.number}: {dict(outputs)} follows from no weights")
        if is_whole and len(ends) != self.ask.n:
            raise Violation(f"request {self.ask.number}: {len(ends)} ends of {self.ask.n} completions")
        if is_whole:
            return Verdict.WHOLE
        return Verdict.LEFT if self.has_left else Verdict.FAILED

    def _fits(self, outputs: dict[int, list[int]], answer: list[list[int]], is_whole: bool) -> bool:
        if is_whole:
            return all(outputs[i] == own for i, own in enumerate(answer))
        return all(own[: len(outputs[i])] == outputs[i] for i, own in enumerate(answer))

    def _read(self) -> tuple[dict[int, list[int]], list[Any], bool]:
        """Return each completion's tokens, the reasons of their ends, and whether the answer is whole."""
        outputs, ends = defaultdict[int, list[int]](list), list[Any]()
        if self.status and self.status != 200:
            self._fail(msgspec.json.decode(self.data))
            return outputs, ends, False
        if not self.ask.stream:
            if self.is_over and self.status:
                self._take(msgspec.json.decode(self.data), outputs, ends)
            return outputs, ends, bool(self.status and self.is_over)
        is_whole = False
        for block in self.data.split(b"\n\n"):
            if block == b"data: [DONE]":
                is_whole = True
            elif block.startswith(b"data: "):
                record = msgspec.json.decode(block[6:])
                if "error" in record:
                    self._fail(record)
                    return outputs, ends, False
                self._take(record, outputs, ends)
        return outputs, ends, is_whole and self.is_over

    def _fail(self, body: Mapping[str, Any]) -> None:
        self.error, self.code = body["error"]["message"], body["error"]["code"] or ""

    def _take(self, record: dict[str, Any], outputs: dict[int, list[int]], ends: list[Any]) -> None:
        for choice in record["choices"]:
            outputs[choice["index"]] += choice["token_ids"]
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []

    def _wanted(self, oracle: Oracle, weights: int, i: int) -> list[int]:
        """Return the tokens of a completion."""
        ask, keys = self.ask, list[int]()
        tokens, prompt, seed, is_over = list(ask.prompt), len(ask.prompt), fold_seed(ask.seed, i), False
        for index in range(ask.most):
            oracle.keys(weights, tokens, prompt, keys)
            mask = None
            if ask.grammar is not None:
                mask = 1 << EOS if is_over else allowed(index, ask.grammar)
            tokens.append(token_after(oracle.sum(keys, prompt + index - 1), seed, prompt + index, mask))
            is_over = is_over or tokens[-1] == EOS
            if tokens[-1] == EOS and not ask.ignores_end:
                break
        return tokens[prompt:]
