"""`kv_transfer_config`: vLLM's KV connectors as options of KV offload and of disaggregated prefill."""

from collections.abc import Mapping
from typing import Any

from ...neutral import without_neutral
from ...refusals import require, shown, unknown
from .checks import GIB
from .engine import EngineOptions

ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}
HOST, PORT = "127.0.0.1", 14579  # vLLM's defaults
DISK_SPACE = 16.0  # GiB of an ExampleConnector's folder, which vLLM does not bound
READ = ("kv_connector", "kv_role", "kv_ip", "kv_port", "kv_connector_extra_config")
# keys that choose how pages are buffered, and by whom
WITHOUT_EFFECT = (
    "engine_id", "kv_rank", "kv_parallel_size", "kv_buffer_device", "kv_buffer_size",
    "kv_load_failure_policy", "enable_permute_local_kv",
)  # fmt: skip


def transfer_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a connector: ExampleConnector is a folder of pages, OffloadingConnector is host
    memory, every other in a role of its own is disaggregated prefill by duetto's transports.

    Raises TypeError for an unknown key, ValueError for a connector that does neither.
    """
    given = without_neutral("kv_transfer", config)
    for key in given:
        if key not in (*READ, *WITHOUT_EFFECT):
            raise TypeError(f"kv_transfer_config: {unknown('key', key, READ, WITHOUT_EFFECT)}")
    connector, role = given.get("kv_connector"), given.get("kv_role")
    extra = given.get("kv_connector_extra_config") or {}
    if connector == "ExampleConnector" and "shared_storage_path" in extra:
        return {"kv_disk_path": extra["shared_storage_path"], "kv_disk_space": DISK_SPACE}
    if connector == "OffloadingConnector" and "cpu_bytes_to_use" in extra:
        return {"swap_space": extra["cpu_bytes_to_use"] / GIB}
    require(
        role in ROLES,
        f"kv_transfer_config: {shown(connector)} as {shown(role)} is not supported: set swap_space or "
        f"kv_disk_space for a cache outside the device, or kv_role {' and '.join(ROLES)}",
    )
    address = f"{given.get('kv_ip', HOST)}:{given.get('kv_port', PORT)}"
    return {"kv_role": ROLES[str(role)], "kv_address": address}


def with_transfer(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords with the options of their `kv_transfer_config`. Raises TypeError for an option that is
    given beside it."""
    rest = dict(given)
    own = transfer_options(config) if (config := rest.pop("kv_transfer_config", None)) else {}
    for name in own:
        if rest.get(name) not in (None, getattr(EngineOptions, name)):
            raise TypeError(f"{name} is given under two names: kv_transfer_config is the second")
    return rest | own
