"""Checks and tokenizes prompts into requests of the engine."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np

from ...checkpoints.adapters.adapter import Adapter
from ...lora.request import LoRARequest, check_lora_request
from ...model.embeddings.prompt import EmbeddingSpan, Prompt
from ...model.pooling import Pooler, Pooling, PoolingParams
from ...neutral_values import PROMPT_FIELDS
from ...refusals import quote
from ...sampling.custom_processors import LogitsProcessor
from ...sampling.params import SamplingParams, completion_seeds, request_knobs, tokenize_bad_words
from ...sampling.state import check_allowed_tokens
from ..engine.core.embedding_pool import SpanLimits
from ..engine.core.output_processor import OutputProcessor
from ..engine.core.request import Request, TokenRecord
from ..engine.lora.registry import AdapterRegistry
from ..host.process import trim_heap
from ..options.engine import EngineOptions
from ..text.cache_salt import hash_salt, read_prompt_salt
from ..text.grammar.compile_probe import CompileLimits
from ..text.grammar.compiler import GrammarCompiler
from ..text.grammar.constraint import Constraint
from ..text.grammar.trace_constraint import TraceConstraint
from ..text.openai.dialect import Dialect
from ..text.openai.tasks import constrain_answer
from ..text.tokenizer.chats.chat import ChatMessage, effort_variables, render_and_tokenize
from ..text.tokenizer.detokenizer import Detokenizer
from ..text.tokenizer.stop_strings import StopStrings
from ..text.tokenizer.tokenizer import Tokenizer
from .subscription import Subscription
from .vllm import check_vllm_arguments

PROMPT_KEYS = ("prompt", "prompt_token_ids")  # keys of a prompt that is a mapping
SALT_KEY = "cache_salt"  # another key of such a prompt
# of an embedding; no token is used
PREFILL_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
PromptInput = str | Sequence[int] | Mapping[str, Any]
PromptInputs = PromptInput | Sequence[PromptInput]
SamplingParamsInput = SamplingParams | Sequence[SamplingParams] | None
Conversations = list[ChatMessage] | list[list[ChatMessage]]


@dataclass
class InputProcessor:
    """Converts prompts to requests of the engine.

    vocab_size: number of token ids
    max_model_len: maximum number of tokens of a request
    options: of the engine
    tokenizer: of the model, if it has one
    eos_ids: ids of end tokens
    no_tokenizer_reason: why there is no tokenizer, for errors
    adapter_registry: adapters that requests may name
    hidden_size: size of the model's hidden states
    default_pooling: pooling that the model's authors recommend for embeddings
    processors: logits processors of the step
    has_head: whether the model can generate
    span_limits: limits on the spans of embeddings in a prompt
    """

    vocab_size: int
    max_model_len: int
    options: EngineOptions
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    no_tokenizer_reason: str = "the model has no tokenizer"
    adapter_registry: AdapterRegistry | None = None
    hidden_size: int = 0
    default_pooling: str | None = None
    processors: tuple[LogitsProcessor, ...] = ()
    has_head: bool = True
    span_limits: SpanLimits = field(default_factory=SpanLimits)

    def __post_init__(self):
        self._arrivals, self._output_processor = itertools.count(), OutputProcessor(self.tokenizer)
        self._unseeded_requests = itertools.count()
        # a tokenizer may have tokens that the model does not
        self.eos_ids = tuple(i for i in self.eos_ids if i < self.vocab_size)
        if self.tokenizer is not None:
            self.tokenizer.split_special_tokens |= self.options.split_special_tokens
        bounds = CompileLimits(self.options.max_grammar_seconds, self.options.max_grammar_mib << 20)
        tokenizer = self.no_tokenizer_reason if self.tokenizer is None else self.tokenizer
        self.grammars = GrammarCompiler(tokenizer, self.vocab_size, self.eos_ids, bounds, trim_heap)

    @property
    def longest_prompt(self) -> int:
        """Maximum number of tokens of a prompt."""
        return min(self.options.max_input_length or self.max_model_len, self.max_model_len - 1)

    def make_subscriptions(
        self, prompts: list[Any], params: Any, priority: Any, adapters: Any, is_awaited: bool = True
    ) -> list[Subscription]:
        """Make a subscription for each prompt. The other arguments are one value for all prompts, or a list.
        Raises ValueError for a list of another length, and as `make_subscription` does."""
        lists = {
            "sampling_params": params,
            "priorities": 0 if priority is None else priority,
            "lora_requests": adapters,
        }
        arguments = zip(
            prompts,
            *(broadcast_over_prompts(name, v, len(prompts)) for name, v in lists.items()),
            strict=True,
        )
        return [
            self.make_subscription(p, s, r, lora_request=a, is_awaited=is_awaited) for p, s, r, a in arguments
        ]

    def make_subscription(
        self,
        prompt: PromptInput | Prompt,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        num_output_ids: int = 0,
        score_from: int = 1,
        is_awaited: bool = True,
        resumed_outputs: Sequence[Sequence[int]] = (),
        lora_request: LoRARequest | None = None,
    ) -> Subscription:
        """Make the requests for one prompt, to generate or to embed.

        prompt: text, token ids, a mapping with `prompt` or `prompt_token_ids` and a `cache_salt`, a `Prompt`
        params: copied, so that later changes have no effect
        priority: smaller goes first
        num_output_ids: number of last prompt ids that are output, which max_input_length does not limit
        score_from: first position of prompt tokens that are scored
        is_awaited: whether a client waits for the first token
        resumed_outputs: token ids that each completion has already

        Raises ValueError or TypeError that names the wrong argument.
        """
        params, pooling = self._check_and_copy_params(params)
        if type(priority) is not int:
            raise TypeError(f"priority is an integer, not {quote(priority)}")
        prompt, spans = (prompt.tokens, prompt.spans) if isinstance(prompt, Prompt) else (prompt, ())
        (text, tokens), salt = self.tokenize(prompt), hash_salt(read_prompt_salt(prompt))
        self.check_prompt(tokens, params, num_output_ids, spans)
        end = self.max_length(tokens, params)
        words, ids = self.bad_word_ids(params), self.stop_ids(params)
        self._check_sampling(params, words, ids)
        adapter = self._get_or_load_adapter(lora_request)
        stop_strings = StopStrings(params.stop_strings)
        requests = [
            Request(
                id="",
                prompt=tokens,
                params=params,
                seed=seed,
                end=end,
                stop_ids=ids,
                eos_ids=() if params.ignore_eos else self._unreported_eos_ids(),
                bad_words=words,
                detokenizer=self.make_detokenizer(params, tokens, stop_strings),
                priority=priority,
                arrival=next(self._arrivals),
                score_from=score_from,
                pooler=None if pooling is None else Pooler(pooling, len(tokens)),
                token_record=TokenRecord() if self.options.is_observing else None,
                max_prefill_delay=self.options.prefill_delay(is_awaited),
                constraint=self.make_constraint(params, len(tokens)),
                adapter=adapter,
                cache_salt=salt,
                spans=spans,
            )
            for seed in completion_seeds(self._request_seed(params), params.n)
        ]
        self._append_resumed_tokens(requests, resumed_outputs)
        return Subscription(requests, text, lora_request, self._output_processor)

    def _append_resumed_tokens(
        self, requests: Sequence[Request], resumed_outputs: Sequence[Sequence[int]]
    ) -> None:
        """Give completions the token ids that they have already. Raises ValueError for tokens that their
        grammar refuses."""
        for request, ids in zip(requests, resumed_outputs, strict=False):
            self._check_ids(ids)
            request.append_resumed_tokens(ids)
            request.advance_grammar()
            if request.finish_reason == "abort":
                raise ValueError(request.stop_reason)

    def _check_and_copy_params(self, params: Any) -> tuple[SamplingParams, PoolingParams | None]:
        if isinstance(params, PoolingParams):
            return PREFILL_PARAMS.clone(), self._with_default_pooling(params)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling parameters are SamplingParams, not {quote(params)}")
        if not self.has_head:
            raise ValueError("the checkpoint stores no lm_head: it makes embeddings, and generates no text")
        copied = params.clone()
        return copied if copied.trace_decode_token_ids is None else copied.replayed(), None

    def _with_default_pooling(self, params: PoolingParams) -> PoolingParams:
        """Return pooling parameters with the model's pooling as the default. Raises ValueError for a pooling
        or a dimension that the model does not have."""
        if params.dimensions is not None and params.dimensions > self.hidden_size:
            raise ValueError(f"dimensions {params.dimensions} is not allowed: at most {self.hidden_size}")
        pooling: Any = params.pooling or self.default_pooling or "last"
        if pooling not in get_args(Pooling):
            raise ValueError(f"the model's pooling {pooling!r} is not supported: give 'last' or 'mean'")
        return replace(params, pooling=pooling)

    def _get_or_load_adapter(self, lora_request: LoRARequest | None) -> Adapter | None:
        if self.adapter_registry is None and check_lora_request(lora_request) is not None:
            raise ValueError("lora_request is not allowed: set enable_lora")
        return (
            None
            if self.adapter_registry is None
            else self.adapter_registry.get_or_load_adapter(check_lora_request(lora_request))
        )

    def tokenize(self, prompt: PromptInput) -> tuple[str | None, list[int]]:
        """Tokenize a prompt. Returns its text (None if it has none) and its token ids."""
        if isinstance(prompt, Mapping):
            return self._tokenize_mapping(prompt)
        if isinstance(prompt, str):
            return prompt, self._encode(prompt)
        return None, convert_token_ids(prompt)

    def _tokenize_mapping(self, prompt: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        """Tokenize a prompt that is a mapping. Given token ids take precedence over its text."""
        neutral = [name for name in PROMPT_FIELDS if not prompt.get(name)]
        others = sorted(str(name) for name in prompt if name not in (*PROMPT_KEYS, SALT_KEY, *neutral))
        if not prompt or others:
            raise TypeError(f"a prompt mapping has prompt or prompt_token_ids, and cache_salt, not {others}")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"prompt must be a string, not {quote(text)}")
        if ids is None and text is not None:
            return text, self._encode(text)
        return text, convert_token_ids(ids)

    def render_conversations(
        self,
        messages: list[ChatMessage] | list[list[ChatMessage]],
        params: Any,
        content_format: str,
        variables: Mapping[str, Any] | None,
        effort: str | None,
        **options: Any,
    ) -> tuple[list[PromptInput], Any]:
        """Render one conversation or several as prompts. Returns the prompts and their sampling parameters.

        `options`, and `variables` of the template, are arguments of `chat.render_with_tokenizer`. A grammar
        begins after the reasoning, except in an answer that is continued. Raises ValueError for an unknown
        `effort` of reasoning.
        """
        check_vllm_arguments(chat_template_content_format=content_format)
        template_variables = effort_variables(effort) | dict(variables or {})
        has_several = isinstance(messages, list) and messages and isinstance(messages[0], list)
        conversations: Any = messages if has_several else [messages]
        prompts: list[PromptInput] = [
            self.render_conversation(conversation, **options, **template_variables)
            for conversation in conversations
        ]
        is_continued = options.get("continue_final_message", False)
        return prompts, params if is_continued else self._constrain_after_reasoning(prompts, params)

    def _constrain_after_reasoning(self, prompts: Sequence[Any], params: Any) -> Any:
        """Return the sampling parameters of conversations, with grammars that begin after the reasoning."""
        prompt_params = broadcast_over_prompts("sampling_params", params, len(prompts))
        if self.tokenizer is None or not any(p.structured_outputs for p in prompt_params):
            return params
        ids, dialect = [prompt["prompt_token_ids"] for prompt in prompts], Dialect(self.tokenizer)
        return [constrain_answer(p, dialect, tokens) for p, tokens in zip(prompt_params, ids, strict=True)]

    def render_conversation(self, messages: Any, **options: Any) -> dict[str, Any]:
        if self.tokenizer is None:
            raise ValueError(f"{self.no_tokenizer_reason}: chat needs one")
        rendered = render_and_tokenize(self.tokenizer, messages, self.longest_prompt, **options)
        return dict(zip(PROMPT_KEYS, rendered, strict=True))

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{self.no_tokenizer_reason}: give the prompt as token ids")
        return self.tokenizer.encode(text, max_tokens=self.longest_prompt)

    def check_prompt(
        self,
        tokens: list[int],
        params: SamplingParams,
        num_output_ids: int = 0,
        spans: tuple[EmbeddingSpan, ...] = (),
    ) -> None:
        if not tokens:
            raise ValueError("the prompt is empty: at least one token is needed")
        self._check_ids(tokens)
        longest = min(self.longest_prompt + num_output_ids, self.max_model_len - 1)
        if len(tokens) > longest:
            raise ValueError(f"the prompt has {len(tokens)} tokens, at most {longest} are allowed")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer: {self.no_tokenizer_reason}")
        if spans and params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs is not allowed: tokens with an encoder's embeddings have none")
        self.span_limits.check(spans, len(tokens))

    def _check_ids(self, tokens: Sequence[int]) -> None:
        wrong = next((t for t in tokens if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"prompt token id {wrong} is outside the vocabulary of {self.vocab_size}")

    def max_length(self, tokens: list[int], params: SamplingParams) -> int:
        """Return the maximum number of tokens of a request, its prompt included."""
        room = self.max_model_len - len(tokens)
        return len(tokens) + min(params.max_tokens or room, self.options.max_output_length or room, room)

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        ends = () if params.ignore_eos else self.eos_ids
        return tuple(dict.fromkeys((*ends, *(params.stop_token_ids or ()))))

    def _unreported_eos_ids(self) -> tuple[int, ...]:
        """Return the end tokens that are no stop reason: the tokenizer's own, as in vLLM, else all."""
        eos_id = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return (eos_id,) if eos_id in self.eos_ids else self.eos_ids

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise ValueError(
                f"bad_words={list(params.bad_words)!r} needs a tokenizer: {self.no_tokenizer_reason}"
            )
        encode = self.tokenizer.encode
        sequences = tokenize_bad_words(params.bad_words, lambda text: encode(text, add_special_tokens=False))
        return tuple(tuple(sequence) for sequence in sequences)

    def _check_sampling(
        self, params: SamplingParams, words: tuple[tuple[int, ...], ...], stops: tuple[int, ...]
    ) -> None:
        """Raise ValueError for sampling parameters that the device does not support."""
        params.check_logprobs(self.options.max_logprobs, self.vocab_size)
        request_knobs(
            params, seed=0, stop_ids=stops, prompt_len=0, bad_words=words, processors=self.processors
        )
        check_allowed_tokens(params, self.vocab_size, stops, words)

    def _request_seed(self, params: SamplingParams) -> int | Sequence[int]:
        """Return the request's seed, or a seed for each completion. A request without one gets a hash of the
        engine's seed and of a counter of such requests."""
        if params.seed is not None:
            return params.seed
        drawn = np.random.SeedSequence(
            [self.options.seed % 2**64, next(self._unseeded_requests)]
        ).generate_state(1)
        return int(drawn[0])

    def make_detokenizer(
        self, params: SamplingParams, prompt: list[int], stop_strings: StopStrings
    ) -> Detokenizer | None:
        """Make the detokenizer of a completion; None if the completion needs no text. Completions of a prompt
        share `stop_strings`."""
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer,
            params.skip_special_tokens,
            stop_strings,
            params.include_stop_str_in_output,
            prompt_ids=prompt,
        )

    def make_constraint(self, params: SamplingParams, start: int) -> Constraint | TraceConstraint | None:
        """Make the constraint of an output that begins at position `start`: a grammar's, or a trace's.
        Returns None for a free output."""
        grammar, trace = params.structured_outputs, params.trace_decode_token_ids
        if trace is not None:
            return TraceConstraint(trace, start, self.vocab_size)
        return None if grammar is None else self.grammars.compile_constraint(grammar, start)


def is_one_prompt(prompts: Any) -> bool:
    """Return whether `prompts` is a single prompt: text, a mapping, or a flat list of token ids."""
    if not isinstance(prompts, (Sequence, np.ndarray)) or isinstance(prompts, (str, bytes)):
        return True
    return len(prompts) > 0 and not isinstance(prompts[0], (Sequence, Mapping, np.ndarray, Prompt))


def list_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[Any]:
    """Return one prompt or several as a list."""
    return [prompts] if is_one_prompt(prompts) else list(prompts)


def broadcast_over_prompts(name: str, value: Any, count: int) -> list[Any]:
    """Return a list with a value for each of `count` prompts. `value` is one value for all, or a list. Raises
    ValueError for a list of another length."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{count} prompts have {len(value)} {name}; there must be one for each")
    return list(value)


def convert_token_ids(prompt: Any) -> list[int]:
    """Return token ids as Python's integers. Raises TypeError for anything else."""
    ids = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
    is_sequence = isinstance(ids, Sequence) and not isinstance(ids, (str, bytes, bytearray))
    if not is_sequence or any(type(t) is not int and not isinstance(t, np.integer) for t in ids):
        raise TypeError(
            f"a prompt is a string, token ids, or a mapping with one of them, not {quote(prompt)}"
        )
    return [int(t) for t in ids]
