"""Names of vLLM, OpenAI, Transformers and PEFT that are accepted with values that have no effect here.

A script or a client may set them to what is done anyway. A value that would change the answer is in no table,
and is refused.
"""

from collections.abc import Mapping
from typing import Any

from .refusals import is_among, quote

NeutralTable = Mapping[str, tuple[Any, ...]]  # values without an effect, by name

# By the scope in which a name is read. The first value is the default of the project that has the name.
# If no value is listed, only None is accepted.
NEUTRAL: dict[str, NeutralTable] = {
    # keywords of vLLM's `LLM` and `EngineArgs`
    "engine": {
        "runner": ("auto", "generate"),
        "task": ("auto", "generate"),
        "convert": ("auto", "none"),
        "model_impl": ("auto", "vllm"),
        "config_format": ("auto", "hf", "mistral"),  # a folder's files say what they are
        "tokenizer_mode": ("auto", "hf", "slow", "mistral"),
        "model_weights": ("",),
        "cpu_offload_gb": (0, 0.0),
        "worker_extension_cls": ("",),
        **dict.fromkeys(("device", "lora_dtype", "worker_cls"), ("auto",)),
        **dict.fromkeys(("prefill_context_parallel_size", "decode_context_parallel_size"), (1,)),
        **dict.fromkeys(("rope_scaling", "quantization_config", "additional_config"), ({},)),
        **dict.fromkeys((
            "skip_tokenizer_init", "calculate_kv_scales", "disable_sliding_window", "enable_prompt_adapter",
            "enable_prompt_embeds", "return_sampling_mask", "tokens_only", "headless",
        ), (False,)),
        **dict.fromkeys((
            "hf_config_path", "chat_template", "rope_theta", "kv_cache_memory_bytes",
            "num_gpu_blocks_override", "kv_offloading_size", "scheduler_cls", "pooler_config",
            "override_pooler_config", "spec_method", "spec_model", "spec_tokens", "kv_transfer_config",
            "kv_events_config", "ec_transfer_config", "weight_transfer_config", "watermark_config",
            "diffusion_config",
        ), ()),
    },
    # vLLM's sampling parameters
    "sampling": {
        "logits_processors": (None, []),
        "logprob_token_ids": (None, []),
        "prompt_logprob_start": (None, 0),
        "stream_interval": (None, 1),
        "skip_clone": (False, True),
        "skip_reading_prefix_cache": (None, False),
        "thinking_token_budget": (None, -1),
        "routed_experts_prompt_start": (0,),
        "best_of": (None, 1),
        "length_penalty": (1.0, 1),
        **dict.fromkeys(("flat_logprobs", "use_beam_search", "early_stopping"), (False,)),
        **dict.fromkeys((
            "guided_decoding", "prompt_logprob_token_ids", "truncate_prompt_tokens", "repetition_detection",
        ), (None,)),
    },
    # keys of vLLM's `kv_transfer_config`
    "kv_transfer": {"kv_connector_module_path": (None,)},
    # keys of vLLM's `speculative_config`
    "speculative": {
        "parallel_drafting": (False,),
        "use_heterogeneous_vocab": (False,),
        "draft_tensor_parallel_size": (None, 1),
        "quantization": (None,),
        "revision": (None,),
    },
    # fields of vLLM's `StructuredOutputsParams`
    "structured_outputs": {
        "structured_outputs.disable_additional_properties": (False, True, None),
        "structured_outputs.structural_tag": (None,),
        "structured_outputs.disable_fallback": (False, True, None),
    },
    # arguments of the methods of vLLM's `LLM`
    "call": {
        "tokenization_kwargs": (None, {}),
        "mm_processor_kwargs": (None, {}),
        "chat_template_content_format": ("auto", "string"),
        "output_type": (None,),
    },
    # fields of OpenAI's completions and chats; a field of tools is neutral if a request has no tools
    "body": {
        "best_of": (1,),
        "chat_template_kwargs": ({},),
        "function_call": ("none", "auto"),
        "length_penalty": (1,),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        **dict.fromkeys(("add_generation_prompt", "detokenize", "include_reasoning"), (True,)),
        **dict.fromkeys((
            "continue_final_message", "early_stopping", "echo", "return_token_ids",
            "return_tokens_as_token_ids", "stream", "use_beam_search",
        ), (False,)),
        **dict.fromkeys(("documents", "functions", "tools"), ([],)),
        **dict.fromkeys(("priority", "top_logprobs"), (0,)),
    },
    # fields of OpenAI's Responses API beyond those of a chat
    "response": {
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),  # reasoning is returned as plain text
        "max_tool_calls": (),
        "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
        "truncation": ("disabled",),
    },
    # keywords of Transformers' tokenizers
    "tokenizer": {
        "text_pair": (None,),
        "padding": (False, None, "do_not_pad"),
        "truncation": (False, None, "do_not_truncate"),
        "max_length": (None,),
        "return_tensors": (None,),
        "return_attention_mask": (True, None),
        "return_assistant_tokens_mask": (False,),
        "tokenizer_kwargs": (None, {}),
        "clean_up_tokenization_spaces": (False, None),
    },
    # fields of PEFT's adapter_config.json; other fields describe how an adapter was trained
    "adapter": {
        "peft_type": ("LORA",),
        "bias": ("none", None),
        "trainable_token_indices": (None, [], {}),
        "use_bdlora": (None, False),
        **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False, None)),
        **dict.fromkeys((
            "modules_to_save", "layer_replication", "target_parameters", "alora_invocation_tokens",
        ), (None, [])),
        **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config"), (None,)),
    },
}  # fmt: skip

# Keywords of vLLM's `LLM` and `EngineArgs` with vLLM's defaults. No value changes a token: they choose how
# devices communicate, what is captured, logged or measured.
EFFECTLESS: dict[str, Any] = {
    "disable_log_requests": True,
    "use_v2_block_manager": True,
    "pt_load_map_location": "cpu",
    "scheduling_policy": "fcfs",
    "prefix_caching_hash_algo": "sha256",
    "long_prefill_token_threshold": 0,
    "stream_interval": 1,
    **dict.fromkeys(("reasoning_parser", "allowed_local_media_path"), ""),
    "model_loader_extra_config": {},
    "limit_mm_per_prompt": {},
    "media_io_kwargs": {},
    **dict.fromkeys((
        "enforce_eager", "trust_remote_code", "allow_deprecated_quantization", "disable_log_stats",
        "enable_log_requests", "disable_async_output_proc", "disable_custom_all_reduce", "enable_eplb",
        "enable_dbo", "enable_trace_replay", "ray_workers_use_nsight", "kv_cache_metrics",
        "enable_mfu_metrics", "enable_sleep_mode", "fully_sharded_loras", "language_model_only",
        "disable_mm_preprocessor_cache", "disable_chunked_mm_input", "skip_mm_profiling",
    ), False),
    **dict.fromkeys((
        "served_model_name", "code_revision", "ignore_patterns", "safetensors_load_strategy",
        "max_parallel_loading_workers", "enable_chunked_prefill", "max_num_partial_prefills",
        "max_long_partial_prefills", "num_scheduler_steps", "num_lookahead_slots", "preemption_mode",
        "async_scheduling", "disable_hybrid_kv_cache_manager", "disable_cascade_attn",
        "distributed_executor_backend", "all2all_backend", "compilation_config", "optimization_level",
        "performance_mode", "cudagraph_capture_sizes", "max_seq_len_to_capture", "attention_backend",
        "attention_config", "kernel_config", "moe_backend", "linear_backend", "structured_outputs_config",
        "guided_decoding_backend", "reasoning_config", "observability_config", "otlp_traces_endpoint",
        "collect_detailed_traces", "show_hidden_metrics_for_version", "logging_config", "max_cpu_loras",
        "mm_processor_kwargs", "mm_processor_cache_gb", "allowed_media_domains",
    )),
}  # fmt: skip

# Keys of vLLM's `speculative_config` that choose how draft tokens are computed: they are verified.
DRAFTING_KEYS = frozenset(("enforce_eager", "disable_padded_drafter_batch", "max_model_len"))

# Fields of OpenAI's bodies that choose how a request is filed, cached or hurried. No value changes the text.
HARMLESS_FIELDS = frozenset((
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "request_id",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
))  # fmt: skip

# Fields of vLLM's prompts that ask for something only if they have a value.
PROMPT_FIELDS = (
    "multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids", "prompt_embeds", "data_parallel_rank",
)  # fmt: skip


# Alternatives to values that are refused, by name.
ALTERNATIVES = {
    "enable_prompt_embeds": "give prompts as token ids",
    "runner": "LLM.embed returns embeddings without it",
    "weight_transfer_config": "update_params and load_params replace weights",
    "skip_tokenizer_init": "give prompts as token ids, and detokenize=False",
}


def check_neutral(scope: str, name: str, value: Any) -> None:
    """Raise ValueError if a name of a scope is set to a value that is not neutral."""
    if not is_among(value, NEUTRAL[scope][name]):
        allowed = " or ".join(map(repr, NEUTRAL[scope][name])) or "None"
        instead = f"; {ALTERNATIVES[name]}" if name in ALTERNATIVES else ""
        raise ValueError(f"{name}={quote(value)} is not supported: only {allowed}{instead}")


def drop_neutral(scope: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without the names of a scope. Raises ValueError for a value that is not neutral."""
    for name in options.keys() & NEUTRAL[scope].keys():
        check_neutral(scope, name, options[name])
    return {name: value for name, value in options.items() if name not in NEUTRAL[scope]}
