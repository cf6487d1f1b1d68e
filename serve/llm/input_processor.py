"""Checks and tokenizes prompts into requests of the engine, and makes outputs of them."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np

from ...checkpoints.adapters.adapter import Adapter
from ...lora.request import LoRARequest, checked
from ...model.pooling import Pooler, Pooling, PoolingParams
from ...neutral import PROMPT
from ...refusals import shown
from ...sampling.checks import ALL
from ...sampling.custom import LogitsProcessor
from ...sampling.params import NO_TOKEN, SamplingParams, fold_seed, knobs_row, tokenize_bad_words
from ...sampling.state import check_choice
from ..engine.core.request import Request, ScoreLog, TokenRecord
from ..engine.lora.registry import Registry
from ..host.process import give_back
from ..options.engine import EngineOptions
from ..text.grammar.constraint import Constraint
from ..text.grammar.gauge import CompileLimits
from ..text.grammar.grammars import Grammars
from ..text.grammar.trace import TraceConstraint
from ..text.openai.dialect import Dialect
from ..text.openai.tasks import constrained
from ..text.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from ..text.tokenizer.chat import Message, effort_variables, rendered_ids
from ..text.tokenizer.detokenizer import Detokenizer
from ..text.tokenizer.tokenizer import Tokenizer
from .request_group import RequestGroup
from .vllm import check_all

TEXTUAL = ("prompt", "prompt_token_ids")  # keys of a prompt that is a mapping
PREFILL = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)  # its one token is ignored
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass
class InputProcessor:
    """Checks and tokenizes prompts at the border."""

    vocab_size: int
    max_model_len: int
    options: EngineOptions
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    lacking: str = "the model has no tokenizer"  # for errors
    adapters: Registry | None = None  # those that requests may name
    width: int = 0  # of the model's hidden states
    pooling: str | None = None  # the one that the model's authors recommend for embeddings
    processors: tuple[LogitsProcessor, ...] = ()  # that the step has

    def __post_init__(self):
        self._arrivals = itertools.count()
        self._unseeded = itertools.count()
        if self.tokenizer is not None:
            self.tokenizer.split_special_tokens |= self.options.split_special_tokens
        bounds = CompileLimits(self.options.max_grammar_seconds, self.options.max_grammar_mib << 20)
        tokenizer = self.lacking if self.tokenizer is None else self.tokenizer
        self.grammars = Grammars(tokenizer, self.vocab_size, self.eos_ids, bounds, give_back)

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a prompt."""
        return min(self.options.max_input_length or self.max_model_len, self.max_model_len - 1)

    def makes(
        self, prompts: list[Any], params: Any, priority: Any, adapters: Any, awaited: bool = True
    ) -> list[Callable[[str], RequestGroup]]:
        """Return for each prompt the function of an id that makes its group; the other arguments are one for
        all, or in lists. Raises ValueError for a list of another length."""
        lists = {
            "sampling_params": params,
            "priorities": 0 if priority is None else priority,
            "lora_requests": adapters,
        }
        each = zip(prompts, *(one_each(name, v, len(prompts)) for name, v in lists.items()), strict=True)
        make = partial(partial, self.group, awaited=awaited)
        return [make(prompt=p, params=s, priority=r, lora_request=a) for p, s, r, a in each]

    def group(
        self,
        id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        written: int = 0,
        score_from: int = 1,
        awaited: bool = True,
        known: Sequence[Sequence[int]] = (),
        lora_request: LoRARequest | None = None,
    ) -> RequestGroup:
        """Make the requests for one prompt, to generate or to embed: text, token ids, or a mapping with
        `prompt` or `prompt_token_ids`.

        The last `written` ids are output, which max_input_length does not limit. Prompt tokens are scored
        from position `score_from` on. `awaited`: a client waits for the first token. `known` are tokens that
        completions have already. The parameters are copied: changing them later has no effect. Raises
        ValueError or TypeError, naming what is wrong.
        """
        params, pooling = self._copied(params)
        if type(priority) is not int:
            raise TypeError(f"priority is an integer, not {shown(priority)}")
        text, tokens = self.tokens(prompt)
        self.check(tokens, params, written)
        end = self.end(tokens, params)
        words = self.bad_words(params)
        self._check_sampling(params, words)
        adapter, seed = self._adapter(lora_request), self._seed(params)
        requests = [
            Request(
                id=id,
                prompt=tokens,
                params=params,
                seed=fold_seed(seed, i),
                end=end,
                stop_ids=self.stop_ids(params),
                eos_ids=() if params.ignore_eos else self._silent_ids(),
                bad_words=words,
                text=self.detokenizer(params, tokens),
                priority=priority,
                arrival=next(self._arrivals),
                score_from=score_from,
                pool=None if pooling is None else Pooler(pooling, len(tokens)),
                record=TokenRecord() if self.options.is_observing else None,
                patience=self.options.patience(awaited),
                constraint=self.constraint(params, len(tokens)),
                adapter=adapter,
            )
            for i in range(params.n)
        ]
        self._resume(requests, known)
        return RequestGroup(id, text, requests, lora_request)

    def _resume(self, requests: Sequence[Request], known: Sequence[Sequence[int]]) -> None:
        """Give completions the tokens that they have already. Raises ValueError for tokens that their grammar
        refuses."""
        for request, ids in zip(requests, known, strict=False):
            self._check_ids(ids)
            request.resume(ids)
            request.obey()
            if request.finish_reason == "abort":
                raise ValueError(request.stop_reason)

    def _copied(self, params: Any) -> tuple[SamplingParams, PoolingParams | None]:
        if isinstance(params, PoolingParams):
            return PREFILL.clone(), self._settled(params)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling parameters are SamplingParams, not {shown(params)}")
        own = params.clone()
        return own if own.trace_decode_token_ids is None else own.replayed(), None

    def _settled(self, params: PoolingParams) -> PoolingParams:
        """Fill in the model's own pooling. Raises ValueError for what the model does not have."""
        if params.dimensions is not None and params.dimensions > self.width:
            raise ValueError(f"dimensions {params.dimensions} is not allowed: at most {self.width}")
        pooling: Any = params.pooling or self.pooling or "last"
        if pooling not in get_args(Pooling):
            raise ValueError(f"the model's pooling {pooling!r} is not supported: give 'last' or 'mean'")
        return replace(params, pooling=pooling)

    def _adapter(self, wanted: LoRARequest | None) -> Adapter | None:
        if self.adapters is None and checked(wanted) is not None:
            raise ValueError("lora_request is not allowed: set enable_lora")
        return None if self.adapters is None else self.adapters.of(checked(wanted))

    def tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return a prompt's text, if it has one, and its token ids."""
        if isinstance(prompt, Mapping):
            return self._mapping(prompt)
        if isinstance(prompt, str):
            return prompt, self._encode(prompt)
        return None, token_ids(prompt)

    def _mapping(self, prompt: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        """Ids take precedence over text, which is then only repeated in the result."""
        others = [
            name for name in prompt if name not in TEXTUAL and not (name in PROMPT and not prompt[name])
        ]
        if not prompt or others:
            raise TypeError(
                f"a prompt mapping has prompt or prompt_token_ids, not {sorted(map(str, others))}"
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"prompt must be a string, not {shown(text)}")
        if ids is None and text is not None:
            return text, self._encode(text)
        return text, token_ids(ids)

    def conversations(
        self,
        messages: list[Message] | list[list[Message]],
        params: Any,
        content_format: str,
        variables: Mapping[str, Any] | None,
        effort: str | None,
        **options: Any,
    ) -> tuple[list[Prompt], Any]:
        """Render one conversation or several as prompts, and return them with their sampling parameters;
        options and variables of the template are those of `chat.render_for`. Raises ValueError for an unknown
        effort of reasoning. An answer that is continued has no reasoning before it."""
        check_all(chat_template_content_format=content_format)
        own = effort_variables(effort) | dict(variables or {})
        several = isinstance(messages, list) and messages and isinstance(messages[0], list)
        each: Any = messages if several else [messages]
        prompts: list[Prompt] = [self.conversation(one, **options, **own) for one in each]
        is_continued = options.get("continue_final_message", False)
        return prompts, params if is_continued else self._after_reasoning(prompts, params)

    def _after_reasoning(self, prompts: Sequence[Any], params: Any) -> Any:
        """Return the sampling parameters of conversations: their grammars begin after the reasoning."""
        each = one_each("sampling_params", params, len(prompts))
        if self.tokenizer is None or not any(own.structured_outputs for own in each):
            return params
        ids, own = [prompt["prompt_token_ids"] for prompt in prompts], Dialect(self.tokenizer)
        return [constrained(p, own, tokens) for p, tokens in zip(each, ids, strict=True)]

    def conversation(self, messages: Any, **options: Any) -> dict[str, Any]:
        if self.tokenizer is None:
            raise ValueError(f"{self.lacking}: chat needs one")
        rendered = rendered_ids(self.tokenizer, messages, self.longest, **options)
        return dict(zip(TEXTUAL, rendered, strict=True))

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{self.lacking}: give the prompt as token ids")
        return self.tokenizer.encode(text, most=self.longest)

    def check(self, tokens: list[int], params: SamplingParams, written: int = 0) -> None:
        if not tokens:
            raise ValueError("the prompt is empty: at least one token is needed")
        self._check_ids(tokens)
        longest = min(self.longest + written, self.max_model_len - 1)
        if len(tokens) > longest:
            raise ValueError(f"the prompt has {len(tokens)} tokens, at most {longest} are allowed")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer: {self.lacking}")

    def _check_ids(self, tokens: Sequence[int]) -> None:
        wrong = next((t for t in tokens if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"prompt token id {wrong} is outside the vocabulary of {self.vocab_size}")

    def end(self, tokens: list[int], params: SamplingParams) -> int:
        """Maximum number of tokens of a request, its prompt included."""
        room = self.max_model_len - len(tokens)
        return len(tokens) + min(params.max_tokens or room, self.options.max_output_length or room, room)

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        ends = () if params.ignore_eos else self.eos_ids
        return tuple(dict.fromkeys((*ends, *(params.stop_token_ids or ()))))

    def _silent_ids(self) -> tuple[int, ...]:
        """End tokens that are no stop reason: the tokenizer's, as in vLLM, or all if it has none."""
        own = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return (own,) if own in self.eos_ids else self.eos_ids

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise ValueError(f"bad_words={list(params.bad_words)!r} needs a tokenizer: {self.lacking}")
        encode = self.tokenizer.encode
        sequences = tokenize_bad_words(params.bad_words, lambda text: encode(text, add_special_tokens=False))
        return tuple(tuple(sequence) for sequence in sequences)

    def _check_sampling(self, params: SamplingParams, words: tuple[tuple[int, ...], ...]) -> None:
        """Refuse, before the request is queued, what the device's rows would refuse."""
        params.check_vocabulary(self.vocab_size)
        params.check_logprobs(self.options.max_logprobs, self.vocab_size)
        stops, own = self.stop_ids(params), self.processors
        knobs_row(params, seed=0, stop_ids=stops, prompt_len=0, bad_words=words, processors=own)
        check_choice(params, self.vocab_size, stops, words)

    def _seed(self, params: SamplingParams) -> int:
        """Return the request's own seed, or one made of the engine's seed and a counter of requests without
        a seed."""
        if params.seed is not None:
            return params.seed
        drawn = np.random.SeedSequence([self.options.seed % 2**64, next(self._unseeded)]).generate_state(1)
        return int(drawn[0])

    def detokenizer(self, params: SamplingParams, prompt: list[int]) -> Detokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer,
            params.skip_special_tokens,
            params.stop_strings,
            params.include_stop_str_in_output,
            prompt_ids=prompt,
        )

    def constraint(self, params: SamplingParams, start: int) -> Constraint | TraceConstraint | None:
        """Return what limits an output that begins at position `start`: a grammar, or a trace."""
        grammar, trace = params.structured_outputs, params.trace_decode_token_ids
        if trace is not None:
            return TraceConstraint(trace, start, self.vocab_size)
        return None if grammar is None else self.grammars.constraint(grammar, start)

    def output(self, group: RequestGroup) -> RequestOutput:
        """Return the output of a group so far."""
        first, finished = group.requests[0], group.finished
        return RequestOutput(
            request_id=group.id,
            prompt=group.prompt,
            prompt_token_ids=first.prompt,
            outputs=[self.completion(i, request) for i, request in enumerate(group.requests)],
            prompt_logprobs=self._prompt_logprobs(first),
            finished=finished,
            metrics=first.metrics() if finished else None,
            num_cached_tokens=first.cached,
            lora_request=group.lora_request,
        )

    def completion(self, index: int, request: Request) -> CompletionOutput:
        wants, top = request.params.logprobs is not None, request.params.logprobs or 0
        return CompletionOutput(
            index=index,
            text=request.text.text if request.text else "",
            token_ids=request.outputs,
            cumulative_logprob=sum(request.scores.logprob) if wants else None,
            logprobs=self._logprobs(request.outputs, request.scores, top) if wants else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            passes=list(request.passes) or None,
            weights=list(request.weights),
            **self._observed(request),
        )

    def _observed(self, request: Request) -> dict[str, np.ndarray]:
        """Return the inner values of a finished request's tokens, the last one's excepted: no step computes
        it."""
        record, most = request.record, len(request.tokens) - 1
        if record is None or not request.finished:
            return {}
        found = {"routed_experts": record.experts[:most], "hidden_states": record.hidden[:most]}
        return {name: np.stack(values) for name, values in found.items() if values}

    def since(self, delta: Delta, request: Request, start: int) -> CompletionOutput:
        """Return what a stream adds to a completion, of which it has delivered `start` tokens."""
        scores, top = None, request.params.logprobs
        if top is not None:
            places = enumerate(delta.token_ids, start)
            scores = [self._alternatives(token, request.scores, i, top) for i, token in places]
        return CompletionOutput(
            index=delta.index,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=scores,
            finish_reason=delta.finish_reason,
            stop_reason=request.stop_reason,
        )

    def _prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        """As in vLLM, None for the first token; None for all unless the request has `prompt_logprobs`."""
        if request.params.prompt_logprobs is None:
            return None
        scores = request.prompt_scores
        tokens = request.prompt[request.score_from : request.unscored]
        unscored = [None] * request.score_from
        return [*unscored, *self._logprobs(tokens, scores, request.params.prompt_logprobs)]

    def _logprobs(self, tokens: list[int], scores: ScoreLog, top: int) -> list[dict[int, Logprob]]:
        return [self._alternatives(token, scores, i, top) for i, token in enumerate(tokens)]

    def _alternatives(self, token: int, scores: ScoreLog, i: int, top: int) -> dict[int, Logprob]:
        """Return the token itself, then the `top` likeliest, or ALL that were reported."""
        found = {token: Logprob(scores.logprob[i], scores.rank[i], self._decoded(token))}
        for rank in range(len(scores.top_ids[i]) if top == ALL else top):
            other = int(scores.top_ids[i][rank])
            if other != NO_TOKEN:
                found.setdefault(
                    other, Logprob(float(scores.top_logprobs[i][rank]), rank + 1, self._decoded(other))
                )
        return found

    def _decoded(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode_token(token)


def is_one_prompt(prompts: Any) -> bool:
    """True for a single prompt: text, a mapping, or a flat list of token ids."""
    if not isinstance(prompts, (Sequence, np.ndarray)) or isinstance(prompts, (str, bytes)):
        return True
    return len(prompts) > 0 and not isinstance(prompts[0], (Sequence, Mapping, np.ndarray))


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Return one prompt or several as a list."""
    return [prompts] if is_one_prompt(prompts) else list(prompts)


def one_each(name: str, given: Any, count: int) -> list[Any]:
    """Return a list with an entry for each prompt, of one value for all or a list. Raises ValueError for a
    wrong length."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{count} prompts have {len(given)} {name}; there must be one for each")
    return list(given)


def token_ids(prompt: Any) -> list[int]:
    """Return token ids as Python's integers. Raises TypeError for anything else."""
    ids = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
    sequence = isinstance(ids, Sequence) and not isinstance(ids, (str, bytes, bytearray))
    if not sequence or any(type(t) is not int and not isinstance(t, np.integer) for t in ids):
        raise TypeError(
            f"a prompt is a string, token ids, or a mapping with one of them, not {shown(prompt)}"
        )
    return [int(t) for t in ids]
