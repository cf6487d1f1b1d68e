"""Known fields of a `quantization_config`, by method.

An unknown field may change what the weights mean, so it is refused unless it is null or empty.
"""

from collections.abc import Collection, Iterator, Mapping

from ...refusals import quote
from ..families.fields import Raw, allow_only

# fields that are read
READ_FIELDS: dict[str, frozenset[str]] = {
    "fp8": frozenset({"weight_block_size", "expert_dtype"}),
    "fbgemm_fp8": frozenset({"weight_block_size"}),
    "compressed-tensors": frozenset({"config_groups", "format", "sparsity_config"}),
    "modelopt": frozenset({"quant_algo", "quantized_layers", "config_groups", "group_size"}),
    "mxfp4": frozenset(),
    "awq": frozenset(
        {"bits", "checkpoint_format", "format", "group_size", "pack_dtype", "version", "zero_point"}
    ),
    "gptq": frozenset(
        {"bits", "checkpoint_format", "format", "group_size", "is_marlin_format", "pack_dtype"}
    ),
}

# modules that stay floats (their tensors show it), the cache, and who wrote the file
COMMON_FIELDS = frozenset({
    "quant_method", "modules_to_not_convert", "ignore", "ignored_layers", "kv_cache_scheme", "dequantize",
    "provider", "producer", "version",
})  # fmt: skip
# how integers were found, programs that load them, and activations
CALIBRATION_FIELDS = frozenset({
    "act_bits", "act_data_type", "act_dynamic", "act_group_aware", "act_group_size", "act_sym",
    "algorithm", "amp", "autoround_version", "backend", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "cache_examples_on_gpu", "damp_auto_increment", "damp_percent", "data_type",
    "dataset", "desc_act", "disable_exllama", "do_fuse", "dynamic", "enable_minmax_tuning",
    "enable_norm_bias_tuning", "enable_quanted_input", "exllama_config", "fuse_max_seq_len",
    "gradient_accumulate_steps", "iters", "lm_head", "low_cpu_mem_usage", "low_gpu_mem_usage", "lr",
    "max_input_length", "meta", "method", "minmax_lr", "model_file_base_name", "model_name_or_path",
    "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "modules_to_fuse", "mse", "n_blocks", "nblocks", "not_use_best_mse", "nsamples", "pack_impl",
    "pad_token_id", "sampler", "scale_dtype", "seqlen", "static_groups", "sym", "to_quant_block_names",
    "tokenizer", "train_bs", "true_sequential", "use_cuda_fp16", "use_exllama",
})  # fmt: skip
IGNORED_FIELDS: dict[str, frozenset[str]] = {
    "fp8": frozenset({
        "activation_block_size", "activation_scheme", "fmt", "is_checkpoint_fp8_serialized",
        "kv_cache_quant_method", "modules_to_convert", "scale_fmt",
    }),
    "fbgemm_fp8": frozenset({"activation_scale_ub"}),
    "compressed-tensors": frozenset({
        "global_compression_ratio", "quantization_status", "run_compressed", "use_optimized_inference",
    }),
    "modelopt": frozenset({"exclude_modules", "kv_cache_quant_algo", "kv_cache_quantized_layers"}),
    "mxfp4": frozenset(),
    "awq": CALIBRATION_FIELDS,
    "gptq": CALIBRATION_FIELDS,
}  # fmt: skip

# fields of one of compressed-tensors' `config_groups`, and of its `weights`
GROUP_FIELDS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
WEIGHTS_FIELDS = frozenset({
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder",
    "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
})  # fmt: skip
LAYER_FIELDS = frozenset({"quant_algo", "group_size"})  # fields of one of ModelOpt's `quantized_layers`


def check_known_fields(config: Raw) -> None:
    """Raise ValueError for a field that is not known for the method of a `quantization_config`."""
    method = config["quant_method"]
    check_field_names(config, READ_FIELDS[method] | IGNORED_FIELDS[method] | COMMON_FIELDS)
    allow_only(config, "pack_dtype", "int32")
    allow_only(config, "expert_dtype", "fp8")
    sparsity = config.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        raise ValueError(
            f"sparsity_config is {quote(sparsity)}, which is not supported: expected format 'dense'"
        )
    layers = config.get("quantized_layers")
    for name, layer in layers.items() if isinstance(layers, Mapping) else ():
        check_field_names(
            layer if isinstance(layer, Mapping) else {}, LAYER_FIELDS, f"quantized_layers.{name}."
        )
    for name, group in config_groups(config):
        check_field_names(group, GROUP_FIELDS, f"config_groups.{name}.")
        check_field_names(group.get("weights") or {}, WEIGHTS_FIELDS, f"config_groups.{name}.weights.")


def check_field_names(raw: Raw, known: Collection[str], prefix: str = "") -> None:
    """Raise ValueError for the first field with a value that is not among the known ones."""
    for name, value in raw.items():
        if name not in known and value is not None and value not in ({}, []):
            raise ValueError(
                f"{prefix}{name} is {quote(value)}, but the field is not known, and may change what the "
                "weights mean"
            )


def config_groups(config: Raw) -> Iterator[tuple[str, Raw]]:
    """Yield the `config_groups` of a `quantization_config` by name. Raises ValueError for other values."""
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(
        isinstance(group, Mapping) and isinstance(group.get("weights") or {}, Mapping)
        for group in groups.values()
    ):
        raise ValueError(f"config_groups is {quote(groups)}, expected an object of objects")
    yield from groups.items()
