"""Checks of engine options against each other; each raises ValueError with the option's name."""

import math
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING

from ...refusals import ensure

if TYPE_CHECKING:
    from .engine import EngineOptions

GIB = 1 << 30
BUCKET_MULTIPLE_TOKENS = 16  # tokens: prefill buckets are multiples of it
SMALLEST_CHUNK_TOKENS = 64  # tokens: one of the prefill buckets
NO_OFFLOAD = {"swap_space": 0, "kv_disk_space": 0}
PARALLEL_OPTIONS = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "nnodes")
KV_ROLES = ("prefill", "decode", "both")
REMOTE_KV_ROLES = KV_ROLES[:2]  # roles whose engines meet at an address
KV_TRANSPORTS = {  # by name, a module of serve/kv/disagg and the class in it
    "shared_memory": "shared_memory:SharedMemoryTransport",
    "tcp": "tcp:TcpTransport",
    "nixl": "nixl:NixlAgent",
}


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def check_option_limits(options: "EngineOptions", limits: Mapping[str, int], other: str) -> None:
    """Check that options are at most their limits in `limits`; the error names the other option, `other`."""
    for name, limit in limits.items():
        value = getattr(options, name)
        is_allowed = value is None or value <= limit
        ensure(is_allowed, f"{name} {value} is not allowed with {other}: only {limit}")


def check_no_draft_model(options: "EngineOptions", other: str) -> None:
    """Check that no draft model is set; the error names the other option, `other`."""
    model = options.speculation.model
    refusal = f"speculative_config: model {model!r} is not allowed with {other}: ngram and suffix draft there"
    ensure(model is None, refusal)


def check_stages(options: "EngineOptions", count: int) -> None:
    """Check the options of a pipeline with `count` stages, or of layers in two parts."""
    groups, slots, ffn_devices = options.micro_batches, options.max_num_seqs, options.experimental_ffn_devices
    refusal = f"micro_batches {groups} is not allowed"
    ensure(groups is None or count > 1, f"{refusal} without a pipeline's stages")
    fits = groups is None or slots is None or groups <= slots
    ensure(fits, f"{refusal} with max_num_seqs {slots}: 1 to {slots}")
    if count == 1:
        return
    other = f"experimental_ffn_devices {ffn_devices}" if ffn_devices else f"{count} pipeline stages"
    check_no_draft_model(options, other)
    ensure(options.kv_role is None, f"kv_role {options.kv_role} is not allowed with {other}")
    check_option_limits(options, {"decode_steps": 1} | NO_OFFLOAD, other)
    ensure(
        (ffn_devices or 1) == 1,
        f"experimental_ffn_devices {ffn_devices} is not allowed: 1, more were never run",
    )
    if ffn_devices:
        check_option_limits(options, dict.fromkeys(PARALLEL_OPTIONS, 1), other)


def check_kv_offload(options: "EngineOptions") -> None:
    """Check KV offload to host memory and to disk."""
    for name in NO_OFFLOAD:
        space = getattr(options, name)
        ensure(0 <= space * GIB < math.inf, f"{name} {space} is not allowed: 0 or more GiB")
    space, path, refusal = options.kv_disk_space, options.kv_disk_path, "is not allowed without"
    has_hashes = options.enable_prefix_caching or not space
    ensure(has_hashes, f"kv_disk_space {refusal} enable_prefix_caching: pages have no names")
    ensure(path != "", "kv_disk_path '' is not allowed: a folder, or None for one in your cache directory")
    ensure(path is None or space > 0, f"kv_disk_path {path!r} {refusal} kv_disk_space: set its GiB")


def check_disaggregation(options: "EngineOptions") -> None:
    """Check disaggregated prefill."""
    role, address, wait = options.kv_role, options.kv_address, options.kv_transfer_timeout
    transport, size = options.kv_transport, options.tensor_parallel_size
    ensure(role in (None, *KV_ROLES), f"kv_role={role!r} is not allowed: {', '.join(KV_ROLES)}, or None")
    ensure(0 <= wait < math.inf, f"kv_transfer_timeout {wait} is not allowed: 0 or more seconds")
    names = f"{', '.join(KV_TRANSPORTS)}, or None"
    ensure(transport in (None, *KV_TRANSPORTS), f"kv_transport {transport!r} is not allowed: {names}")
    has_address = role not in REMOTE_KV_ROLES or address is not None
    refusal = f"kv_role {role} is not allowed"
    ensure(has_address, f"{refusal} without kv_address: host:port of the prefill engine")
    at_address = dict.fromkeys(("kv_address", "kv_transport"), REMOTE_KV_ROLES)
    device_options = ("prefill_devices", "decode_devices")
    for name, roles in (at_address | dict.fromkeys(device_options, ("both",))).items():
        value, allowed = getattr(options, name), " and ".join(roles)
        is_used = value is None or role in roles
        ensure(is_used, f"{name} {value!r} is not allowed with kv_role {role}: only {allowed}")
    are_set = (options.prefill_devices is None) == (options.decode_devices is None)
    ensure(are_set, "prefill_devices and decode_devices are not allowed without each other: set both")
    has_several = address is not None and len(parse_kv_addresses(address)) > 1
    is_decode = role != "prefill" or not has_several
    ensure(is_decode, f"kv_address {address!r} is not allowed with kv_role prefill: only one")
    if role is None:
        return
    has_hashes = options.enable_prefix_caching
    ensure(has_hashes, f"{refusal} without enable_prefix_caching: pages have no names")
    alone = "nnodes", "data_parallel_size", "pipeline_parallel_size"
    check_option_limits(options, dict.fromkeys(alone, 1), f"kv_role {role}")
    refusal = f"tensor_parallel_size {size} is not allowed with kv_role both"
    ensure(role != "both" or size == 1, f"{refusal}: set prefill_devices and decode_devices")


def check_nodes(options: "EngineOptions") -> None:
    """Check the options of several processes with one mesh."""
    rank, count = options.node_rank, options.nnodes
    ensure(0 <= rank < count, f"node_rank {rank} is not allowed: 0 to nnodes - 1, {count - 1}")
    if count > 1:
        alone = "pipeline_parallel_size", "data_parallel_size"
        check_option_limits(options, dict.fromkeys(alone, 1) | NO_OFFLOAD, f"nnodes {count}")


def check_data_parallel(options: "EngineOptions") -> None:
    """Check data parallelism: several shards, each with its own cache."""
    if (d := options.data_parallel_size) == 1:
        return
    other = f"data_parallel_size {d}"
    for name in ("max_num_seqs", "max_batched_token_mem"):
        value = getattr(options, name) or 0
        ensure(value % d == 0, f"{name} {value} is not allowed with {other}: only a multiple of it")
    check_option_limits(options, {"pipeline_parallel_size": 1} | NO_OFFLOAD, other)
    check_no_draft_model(options, other)


def check_cluster_key(options: "EngineOptions") -> None:
    """Check that an address that other machines reach has a key."""
    meeting, file = [*rendezvous_hosts(options)], options.cluster_key_file
    ensure(file != "", "cluster_key_file '' is not allowed: the name of a file, or None")
    is_used = file is None or meeting != []
    ensure(is_used, "cluster_key_file is not allowed without kv_role prefill or decode, or nnodes")
    for name, host in meeting:
        ensure(
            file is not None or is_loopback_host(host),
            f"{name} {getattr(options, name)!r} is not allowed without cluster_key_file: other machines "
            "reach it; make a key with `openssl rand -hex 32`, and give every machine the same file",
        )


def rendezvous_hosts(options: "EngineOptions") -> Iterator[tuple[str, str]]:
    """Yield each option with an address where processes meet, and each of its hosts."""
    if options.kv_role in REMOTE_KV_ROLES:
        for host, _ in parse_kv_addresses(str(options.kv_address)).values():
            yield "kv_address", host
    if options.nnodes > 1:
        yield "master_addr", options.master_addr


def is_loopback_host(host: str) -> bool:
    """Return True if only this machine reaches an address. A name other than localhost may be anywhere."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def parse_kv_addresses(addresses: str) -> dict[str, tuple[str, int]]:
    """Return host and port of each address in a list that is separated by commas."""
    parsed = {address.strip(): parse_kv_address(address.strip()) for address in addresses.split(",")}
    are_different = len(parsed) > addresses.count(",")
    ensure(are_different, f"kv_address {addresses!r} is not allowed: each is another one")
    return parsed


def parse_kv_address(address: str) -> tuple[str, int]:
    """Return host and port of an address."""
    host, _, port = address.rpartition(":")
    is_port = port.isdecimal() and int(port) < 1 << 16
    ensure(bool(host) and is_port, f"kv_address {address!r} is not allowed: host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_lora(options: "EngineOptions") -> None:
    """Check LoRA adapters: they need one process, without `kv_role` and `experimental_ffn_devices`."""
    if not options.enable_lora:
        for name in ("lora_modules", "lora_experts"):
            ensure(not getattr(options, name), f"{name} is not allowed without enable_lora")
        return
    for name in ("kv_role", "experimental_ffn_devices"):
        value = getattr(options, name)
        ensure(value is None, f"{name} {value} is not allowed with enable_lora")
    check_option_limits(options, {"nnodes": 1}, "enable_lora")
    if options.lora_experts:
        check_option_limits(options, dict.fromkeys(PARALLEL_OPTIONS, 1), "lora_experts")


def check_observed_values(options: "EngineOptions") -> None:
    """Check the options of values that steps report besides tokens.

    Each step then computes one token of a row, on one device or on a tensor-parallel mesh.
    """
    layers = options.hidden_state_layers or ()
    is_rising = all(a < b for a, b in zip((-1, *layers), layers, strict=False))
    ensure(is_rising, f"hidden_state_layers {layers} is not allowed: rising numbers from 0")
    if not options.is_observing:
        return
    name = "hidden_state_layers" if layers else "enable_return_routed_experts"
    alone = "decode_steps", "data_parallel_size", "pipeline_parallel_size", "nnodes"
    check_option_limits(options, dict.fromkeys(alone, 1), name)
    for other in ("kv_role", "experimental_ffn_devices"):
        value = getattr(options, other)
        ensure(value is None, f"{other} {value} is not allowed with {name}")
    ensure(not options.max_draft_tokens, f"speculative_config is not allowed with {name}")


def check_prefill_buckets(options: "EngineOptions") -> None:
    """Check the lengths that prompts are padded to."""
    if (edges := options.prefill_buckets) is None:
        return
    last = round_up(options.prefill_tokens, SMALLEST_CHUNK_TOKENS)
    rising = all(a < b for a, b in zip([0, *edges], edges, strict=False))
    ensure(
        bool(edges)
        and rising
        and not any(edge % BUCKET_MULTIPLE_TOKENS for edge in edges)
        and edges[-1] == last,
        f"prefill_buckets {tuple(edges)} is not allowed: rising multiples of {BUCKET_MULTIPLE_TOKENS}, "
        f"of which the last is {last}, max_prefill_tokens rounded up to a multiple of "
        f"{SMALLEST_CHUNK_TOKENS}",
    )


OPTION_CHECKS = (
    check_kv_offload,
    check_disaggregation,
    check_nodes,
    check_data_parallel,
    check_cluster_key,
    check_prefill_buckets,
    check_lora,
    check_observed_values,
)
