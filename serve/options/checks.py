"""What options of an engine allow beside each other: each check raises ValueError with the option's name."""

import math
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import EngineOptions

GIB = 1 << 30
EDGE, SMALLEST_CHUNK = 16, 64  # tokens: what a prefill bucket is a multiple of, and one that every table has
UNTIERED = {"swap_space": 0, "kv_disk_space": 0}
LAYOUTS = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "nnodes")
ROLES = ("prefill", "decode", "both")
APART = ROLES[:2]  # those of an engine that meets others at an address
KV_TRANSPORTS = {  # by name, a module of serve/kv/disagg and the class in it
    "shared_memory": "shared_memory:SharedMemoryTransport",
    "tcp": "tcp:TcpTransport",
    "nixl": "nixl:NixlAgent",
}


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def only(options: "EngineOptions", most: Mapping[str, int], beside: str) -> None:
    """Nothing of what is more beside another option."""
    for name, limit in most.items():
        if getattr(options, name) > limit:
            raise ValueError(f"{name} {getattr(options, name)} is not allowed with {beside}: only {limit}")


def check_stages(options: "EngineOptions", count: int) -> None:
    """A pipeline of so many stages, or two parts of each layer."""
    groups, seats, apart = options.micro_batches, options.max_num_seqs, options.experimental_ffn_devices
    if groups is not None and count == 1:
        raise ValueError(f"micro_batches {groups} is not allowed without a pipeline's stages")
    if groups is not None and seats is not None and groups > seats:
        raise ValueError(f"micro_batches {groups} is not allowed with max_num_seqs {seats}: 1 to {seats}")
    if count == 1:
        return
    beside = f"experimental_ffn_devices {apart}" if apart else f"{count} pipeline stages"
    if options.speculation.model is not None:
        raise ValueError(
            f"speculative_config: model {options.speculation.model!r} is not allowed with {beside}: "
            "ngram and suffix draft there"
        )
    if options.kv_role is not None:
        raise ValueError(f"kv_role {options.kv_role} is not allowed with {beside}")
    if options.enable_lora:
        raise ValueError(f"enable_lora is not allowed with {beside}")
    only(options, {"decode_steps": 1} | UNTIERED, beside)
    if apart is not None and apart > 1:
        raise ValueError(f"experimental_ffn_devices {apart} is not allowed: 1, more were never run")
    if apart:
        only(options, dict.fromkeys(LAYOUTS, 1), beside)


def check_tiers(options: "EngineOptions") -> None:
    """Pages in the host's memory and in files."""
    for name in UNTIERED:
        if not 0 <= getattr(options, name) * GIB < math.inf:
            raise ValueError(f"{name} {getattr(options, name)} is not allowed: 0 or more GiB")
    path = options.kv_disk_path
    if options.kv_disk_space and not options.enable_prefix_caching:
        raise ValueError("kv_disk_space is not allowed without enable_prefix_caching: pages have no names")
    if path == "":
        raise ValueError("kv_disk_path '' is not allowed: a folder, or None for one in your cache directory")
    if path is not None and not options.kv_disk_space:
        raise ValueError(f"kv_disk_path {path!r} is not allowed without kv_disk_space: set its GiB")


def check_handover(options: "EngineOptions") -> None:
    """Prefill and decode in two engines."""
    role = options.kv_role
    if role not in (None, *ROLES):
        raise ValueError(f"kv_role={role!r} is not allowed: {', '.join(ROLES)}, or None")
    if not 0 <= options.kv_patience < math.inf:
        raise ValueError(f"kv_patience {options.kv_patience} is not allowed: 0 or more seconds")
    if options.kv_transport not in (None, *KV_TRANSPORTS):
        names = ", ".join(KV_TRANSPORTS)
        raise ValueError(f"kv_transport {options.kv_transport!r} is not allowed: {names}, or None")
    if role in APART and options.kv_address is None:
        raise ValueError(f"kv_role {role} is not allowed without kv_address: host:port of the prefill engine")
    for name, roles in {
        "kv_address": APART,
        "kv_transport": APART,
        "prefill_devices": ("both",),
        "decode_devices": ("both",),
    }.items():
        if getattr(options, name) is not None and role not in roles:
            allowed = " and ".join(roles)
            raise ValueError(
                f"{name} {getattr(options, name)!r} is not allowed with kv_role {role}: only {allowed}"
            )
    if (options.prefill_devices is None) != (options.decode_devices is None):
        raise ValueError("prefill_devices and decode_devices are not allowed without each other: set both")
    if options.kv_address is not None:
        several = len(places_of(options.kv_address)) > 1
        if several and role == "prefill":
            raise ValueError(
                f"kv_address {options.kv_address!r} is not allowed with kv_role prefill: only one"
            )
    if role is None:
        return
    if not options.enable_prefix_caching:
        raise ValueError(f"kv_role {role} is not allowed without enable_prefix_caching: pages have no names")
    for name in ("nnodes", "data_parallel_size", "pipeline_parallel_size"):
        if getattr(options, name) > 1:
            raise ValueError(f"{name} {getattr(options, name)} is not allowed with kv_role {role}: only 1")
    size = options.tensor_parallel_size
    if role == "both" and size > 1:
        raise ValueError(
            f"tensor_parallel_size {size} is not allowed with kv_role both: set prefill_devices and "
            "decode_devices"
        )


def check_nodes(options: "EngineOptions") -> None:
    """Several processes of one mesh."""
    if not 0 <= options.node_rank < options.nnodes:
        raise ValueError(
            f"node_rank {options.node_rank} is not allowed: 0 to nnodes - 1, {options.nnodes - 1}"
        )
    if options.nnodes > 1:
        alone = "pipeline_parallel_size", "data_parallel_size"
        only(options, dict.fromkeys(alone, 1) | UNTIERED, f"nnodes {options.nnodes}")


def check_shards(options: "EngineOptions") -> None:
    """Several shards, each with a cache of its own."""
    d = options.data_parallel_size
    if d == 1:
        return
    for name in ("max_num_seqs", "max_batched_token_mem"):
        if (value := getattr(options, name) or 0) % d:
            raise ValueError(
                f"{name} {value} is not allowed with data_parallel_size {d}: only a multiple of it"
            )
    only(options, {"pipeline_parallel_size": 1} | UNTIERED, f"data_parallel_size {d}")
    if options.speculation.model is not None:
        raise ValueError(
            f"speculative_config: model {options.speculation.model!r} is not allowed with "
            f"data_parallel_size {d}: ngram and suffix draft there"
        )


def check_key(options: "EngineOptions") -> None:
    """A port that other machines reach has a key."""
    meeting = [*meeting_places(options)]
    if options.cluster_key_file == "":
        raise ValueError("cluster_key_file '' is not allowed: the name of a file, or None")
    if options.cluster_key_file is not None and not meeting:
        raise ValueError("cluster_key_file is not allowed without kv_role prefill or decode, or nnodes")
    for name, host in meeting:
        if options.cluster_key_file is None and not is_loopback(host):
            raise ValueError(
                f"{name} {getattr(options, name)!r} is not allowed without cluster_key_file: other machines "
                "reach it; make a key with `openssl rand -hex 32`, and give every machine the same file"
            )


def meeting_places(options: "EngineOptions") -> Iterator[tuple[str, str]]:
    """Options that name an address where processes meet, and its hosts."""
    if options.kv_role in APART:
        for host, _ in places_of(str(options.kv_address)).values():
            yield "kv_address", host
    if options.nnodes > 1:
        yield "master_addr", options.master_addr


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. A name other than localhost may be anywhere."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def places_of(addresses: str) -> dict[str, tuple[str, int]]:
    """Hosts and ports of addresses with commas between them."""
    places = {address.strip(): place_of(address.strip()) for address in addresses.split(",")}
    if len(places) <= addresses.count(","):
        raise ValueError(f"kv_address {addresses!r} is not allowed: each is another one")
    return places


def place_of(address: str) -> tuple[str, int]:
    """Host and port of an address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError(f"kv_address {address!r} is not allowed: host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_lora(options: "EngineOptions") -> None:
    """Adapters beside the weights, which lie on one device, or are split over several layer by layer."""
    if not options.enable_lora:
        if options.lora_modules:
            raise ValueError("lora_modules is not allowed without enable_lora")
        return
    if options.kv_role is not None:
        raise ValueError(f"kv_role {options.kv_role} is not allowed with enable_lora")
    if options.experimental_ffn_devices:
        raise ValueError(
            f"experimental_ffn_devices {options.experimental_ffn_devices} is not allowed with enable_lora"
        )
    only(options, dict.fromkeys(("data_parallel_size", "pipeline_parallel_size", "nnodes"), 1), "enable_lora")


def check_buckets(options: "EngineOptions") -> None:
    """Lengths that prompts are padded to."""
    edges = options.prefill_buckets
    if edges is None:
        return
    last = round_up(options.prefill_tokens, SMALLEST_CHUNK)
    rising = all(a < b for a, b in zip([0, *edges], edges, strict=False))
    if not edges or not rising or any(edge % EDGE for edge in edges) or edges[-1] != last:
        raise ValueError(
            f"prefill_buckets {tuple(edges)} is not allowed: rising multiples of {EDGE}, "
            f"of which the last is {last}, max_prefill_tokens "
            f"rounded up to a multiple of {SMALLEST_CHUNK}"
        )
