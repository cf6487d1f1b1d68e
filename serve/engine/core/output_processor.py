"""Makes outputs of the engine's requests: text, tokens and log-probabilities."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....sampling.checks import ALL_LOGPROBS
from ....sampling.params import NO_TOKEN
from ...text.outputs import CompletionOutput, Logprob
from ...text.tokenizer.tokenizer import Tokenizer
from .request import Request, ScoreLog


@dataclass(frozen=True)
class OutputProcessor:
    """Makes outputs of requests.

    tokenizer: decodes the tokens of log-probabilities; without one they have no text
    """

    tokenizer: Tokenizer | None = None

    def make_completion(self, index: int, request: Request) -> CompletionOutput:
        """Make the output of a request's whole completion so far."""
        has_logprobs, top = request.params.logprobs is not None, request.params.logprobs or 0
        return CompletionOutput(
            index=index,
            text=request.detokenizer.text if request.detokenizer else "",
            token_ids=request.output_tokens,
            cumulative_logprob=sum(request.scores.logprob) if has_logprobs else None,
            logprobs=self._logprobs(request.output_tokens, request.scores, top) if has_logprobs else None,
            logprob_array=np.array(request.scores.logprob, np.float32) if has_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            passes=list(request.passes) or None,
            weights=list(request.weights_versions),
            **list_recorded_values(request),
        )

    def make_new_completion(
        self, index: int, request: Request, text: str, tokens: list[int], start: int
    ) -> CompletionOutput:
        """Make the output of a request's new `text` and `tokens`, the first of which is its output token
        `start`."""
        top, new_scores = request.params.logprobs, request.scores.logprob[start : start + len(tokens)]
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=tokens,
            logprobs=None if top is None else self._logprobs(tokens, request.scores, top, start),
            logprob_array=None if top is None else np.array(new_scores, np.float32),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )

    def make_prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        """Make the prompt tokens' alternatives. As in vLLM, the first is None. Returns None unless the
        request has `prompt_logprobs`."""
        if request.params.prompt_logprobs is None:
            return None
        scores = request.prompt_scores
        tokens = request.prompt[request.score_from : request.first_unscored]
        unscored = [None] * request.score_from
        return [*unscored, *self._logprobs(tokens, scores, request.params.prompt_logprobs)]

    def _logprobs(
        self, tokens: list[int], scores: ScoreLog, top: int, start: int = 0
    ) -> list[dict[int, Logprob]]:
        return [self._alternatives(token, scores, i, top) for i, token in enumerate(tokens, start)]

    def _alternatives(self, token: int, scores: ScoreLog, i: int, top: int) -> dict[int, Logprob]:
        """Return the log-probabilities at position `i`: of the token, then of the `top` likeliest.
        `ALL_LOGPROBS` means every reported token."""
        alternatives = {token: Logprob(scores.logprob[i], scores.rank[i], self._decode_token(token))}
        for rank in range(len(scores.top_ids[i]) if top == ALL_LOGPROBS else top):
            other = int(scores.top_ids[i][rank])
            if other != NO_TOKEN:
                alternatives.setdefault(
                    other, Logprob(float(scores.top_logprobs[i][rank]), rank + 1, self._decode_token(other))
                )
        return alternatives

    def _decode_token(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode_token(token)


def list_recorded_values(request: Request) -> dict[str, Any]:
    """Return the recorded experts and hidden states of a finished request's tokens. The last token has none:
    no step takes it as an input."""
    record, num_tokens = request.token_record, len(request.tokens) - 1
    if record is None or not request.is_finished:
        return {}
    recorded = {
        "routed_experts": record.experts[:num_tokens],
        "hidden_states": record.hidden[:num_tokens],
    }
    return {name: np.stack(values) for name, values in recorded.items() if values}
