"""Checks of engine options against each other; each raises ValueError with the option's name."""

import math
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING

from ...refusals import require

if TYPE_CHECKING:
    from .engine import EngineOptions

GIB = 1 << 30
EDGE, SMALLEST_CHUNK = 16, 64  # tokens: prefill buckets are multiples of EDGE, and one is SMALLEST_CHUNK
UNTIERED = {"swap_space": 0, "kv_disk_space": 0}
LAYOUTS = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "nnodes")
ROLES = ("prefill", "decode", "both")
APART = ROLES[:2]  # roles whose engines meet at an address
KV_TRANSPORTS = {  # by name, a module of serve/kv/disagg and the class in it
    "shared_memory": "shared_memory:SharedMemoryTransport",
    "tcp": "tcp:TcpTransport",
    "nixl": "nixl:NixlAgent",
}


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def only(options: "EngineOptions", most: Mapping[str, int], beside: str) -> None:
    """Check that options are at most `most`, next to another option."""
    for name, limit in most.items():
        value = getattr(options, name)
        is_allowed = value is None or value <= limit
        require(is_allowed, f"{name} {value} is not allowed with {beside}: only {limit}")


def check_no_draft_model(options: "EngineOptions", beside: str) -> None:
    model = options.speculation.model
    refusal = (
        f"speculative_config: model {model!r} is not allowed with {beside}: ngram and suffix draft there"
    )
    require(model is None, refusal)


def check_stages(options: "EngineOptions", count: int) -> None:
    """Check a pipeline of `count` stages, or of two parts of each layer."""
    groups, seats, apart = options.micro_batches, options.max_num_seqs, options.experimental_ffn_devices
    refusal = f"micro_batches {groups} is not allowed"
    require(groups is None or count > 1, f"{refusal} without a pipeline's stages")
    fits = groups is None or seats is None or groups <= seats
    require(fits, f"{refusal} with max_num_seqs {seats}: 1 to {seats}")
    if count == 1:
        return
    beside = f"experimental_ffn_devices {apart}" if apart else f"{count} pipeline stages"
    check_no_draft_model(options, beside)
    require(options.kv_role is None, f"kv_role {options.kv_role} is not allowed with {beside}")
    only(options, {"decode_steps": 1} | UNTIERED, beside)
    require((apart or 1) == 1, f"experimental_ffn_devices {apart} is not allowed: 1, more were never run")
    if apart:
        only(options, dict.fromkeys(LAYOUTS, 1), beside)


def check_tiers(options: "EngineOptions") -> None:
    """Check KV offload to host memory and to disk."""
    for name in UNTIERED:
        space = getattr(options, name)
        require(0 <= space * GIB < math.inf, f"{name} {space} is not allowed: 0 or more GiB")
    space, path, refusal = options.kv_disk_space, options.kv_disk_path, "is not allowed without"
    has_names = options.enable_prefix_caching or not space
    require(has_names, f"kv_disk_space {refusal} enable_prefix_caching: pages have no names")
    require(path != "", "kv_disk_path '' is not allowed: a folder, or None for one in your cache directory")
    require(path is None or space > 0, f"kv_disk_path {path!r} {refusal} kv_disk_space: set its GiB")


def check_handover(options: "EngineOptions") -> None:
    """Check disaggregated prefill."""
    role, address, wait = options.kv_role, options.kv_address, options.kv_transfer_timeout
    transport, size = options.kv_transport, options.tensor_parallel_size
    require(role in (None, *ROLES), f"kv_role={role!r} is not allowed: {', '.join(ROLES)}, or None")
    require(0 <= wait < math.inf, f"kv_transfer_timeout {wait} is not allowed: 0 or more seconds")
    names = f"{', '.join(KV_TRANSPORTS)}, or None"
    require(transport in (None, *KV_TRANSPORTS), f"kv_transport {transport!r} is not allowed: {names}")
    has_address = role not in APART or address is not None
    refusal = f"kv_role {role} is not allowed"
    require(has_address, f"{refusal} without kv_address: host:port of the prefill engine")
    at_address, here = (
        dict.fromkeys(("kv_address", "kv_transport"), APART),
        ("prefill_devices", "decode_devices"),
    )
    for name, roles in (at_address | dict.fromkeys(here, ("both",))).items():
        value, allowed = getattr(options, name), " and ".join(roles)
        is_used = value is None or role in roles
        require(is_used, f"{name} {value!r} is not allowed with kv_role {role}: only {allowed}")
    are_set = (options.prefill_devices is None) == (options.decode_devices is None)
    require(are_set, "prefill_devices and decode_devices are not allowed without each other: set both")
    several = address is not None and len(places_of(address)) > 1
    is_decode = role != "prefill" or not several
    require(is_decode, f"kv_address {address!r} is not allowed with kv_role prefill: only one")
    if role is None:
        return
    has_names = options.enable_prefix_caching
    require(has_names, f"{refusal} without enable_prefix_caching: pages have no names")
    alone = "nnodes", "data_parallel_size", "pipeline_parallel_size"
    only(options, dict.fromkeys(alone, 1), f"kv_role {role}")
    refusal = f"tensor_parallel_size {size} is not allowed with kv_role both"
    require(role != "both" or size == 1, f"{refusal}: set prefill_devices and decode_devices")


def check_nodes(options: "EngineOptions") -> None:
    """Check several processes of one mesh."""
    rank, count = options.node_rank, options.nnodes
    require(0 <= rank < count, f"node_rank {rank} is not allowed: 0 to nnodes - 1, {count - 1}")
    if count > 1:
        alone = "pipeline_parallel_size", "data_parallel_size"
        only(options, dict.fromkeys(alone, 1) | UNTIERED, f"nnodes {count}")


def check_shards(options: "EngineOptions") -> None:
    """Check data parallelism: several shards, each with its own cache."""
    if (d := options.data_parallel_size) == 1:
        return
    beside = f"data_parallel_size {d}"
    for name in ("max_num_seqs", "max_batched_token_mem"):
        value = getattr(options, name) or 0
        require(value % d == 0, f"{name} {value} is not allowed with {beside}: only a multiple of it")
    only(options, {"pipeline_parallel_size": 1} | UNTIERED, beside)
    check_no_draft_model(options, beside)


def check_key(options: "EngineOptions") -> None:
    """Check that a port which other machines reach has a key."""
    meeting, file = [*meeting_places(options)], options.cluster_key_file
    require(file != "", "cluster_key_file '' is not allowed: the name of a file, or None")
    is_used = file is None or meeting != []
    require(is_used, "cluster_key_file is not allowed without kv_role prefill or decode, or nnodes")
    for name, host in meeting:
        require(
            file is not None or is_loopback(host),
            f"{name} {getattr(options, name)!r} is not allowed without cluster_key_file: other machines "
            "reach it; make a key with `openssl rand -hex 32`, and give every machine the same file",
        )


def meeting_places(options: "EngineOptions") -> Iterator[tuple[str, str]]:
    """Yield options that name an address where processes meet, and its hosts."""
    if options.kv_role in APART:
        for host, _ in places_of(str(options.kv_address)).values():
            yield "kv_address", host
    if options.nnodes > 1:
        yield "master_addr", options.master_addr


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address; a name other than localhost may be anywhere."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def places_of(addresses: str) -> dict[str, tuple[str, int]]:
    """Return hosts and ports of addresses that are separated by commas."""
    places = {address.strip(): place_of(address.strip()) for address in addresses.split(",")}
    are_different = len(places) > addresses.count(",")
    require(are_different, f"kv_address {addresses!r} is not allowed: each is another one")
    return places


def place_of(address: str) -> tuple[str, int]:
    """Return host and port of an address."""
    host, _, port = address.rpartition(":")
    is_port = port.isdecimal() and int(port) < 1 << 16
    require(bool(host) and is_port, f"kv_address {address!r} is not allowed: host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_lora(options: "EngineOptions") -> None:
    """Check adapters: their model belongs to one process, and its layers are whole."""
    if not options.enable_lora:
        for name in ("lora_modules", "lora_experts"):
            require(not getattr(options, name), f"{name} is not allowed without enable_lora")
        return
    for name in ("kv_role", "experimental_ffn_devices"):
        value = getattr(options, name)
        require(value is None, f"{name} {value} is not allowed with enable_lora")
    only(options, {"nnodes": 1}, "enable_lora")
    if options.lora_experts:
        only(options, dict.fromkeys(LAYOUTS, 1), "lora_experts")


def check_observed(options: "EngineOptions") -> None:
    """Check what steps report besides tokens: each step computes one token of a row, on one device or on a
    mesh of one request's."""
    layers = options.hidden_state_layers or ()
    is_rising = all(a < b for a, b in zip((-1, *layers), layers, strict=False))
    require(is_rising, f"hidden_state_layers {layers} is not allowed: rising numbers from 0")
    if not options.is_observing:
        return
    name = "hidden_state_layers" if layers else "enable_return_routed_experts"
    alone = "decode_steps", "data_parallel_size", "pipeline_parallel_size", "nnodes"
    only(options, dict.fromkeys(alone, 1), name)
    for other in ("kv_role", "experimental_ffn_devices"):
        value = getattr(options, other)
        require(value is None, f"{other} {value} is not allowed with {name}")
    require(not options.guesses, f"speculative_config is not allowed with {name}")


def check_buckets(options: "EngineOptions") -> None:
    """Check the lengths that prompts are padded to."""
    if (edges := options.prefill_buckets) is None:
        return
    last = round_up(options.prefill_tokens, SMALLEST_CHUNK)
    rising = all(a < b for a, b in zip([0, *edges], edges, strict=False))
    require(
        bool(edges) and rising and not any(edge % EDGE for edge in edges) and edges[-1] == last,
        f"prefill_buckets {tuple(edges)} is not allowed: rising multiples of {EDGE}, of which the last is "
        f"{last}, max_prefill_tokens rounded up to a multiple of {SMALLEST_CHUNK}",
    )


ALL = (
    check_tiers,
    check_handover,
    check_nodes,
    check_shards,
    check_key,
    check_buckets,
    check_lora,
    check_observed,
)
