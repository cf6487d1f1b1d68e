"""`kv_transfer_config`: vLLM's KV connectors as options of KV offload and of disaggregated prefill."""

from collections.abc import Mapping
from typing import Any

from ...neutral_values import drop_neutral
from ...refusals import ensure, quote, unknown_name_message
from .checks import GIB
from .engine import EngineOptions

DUETTO_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}
DEFAULT_KV_HOST, DEFAULT_KV_PORT = "127.0.0.1", 14579  # vLLM's defaults
DISK_GIB = 16.0  # GiB of an ExampleConnector's folder, which vLLM does not bound
READ_KEYS = ("kv_connector", "kv_role", "kv_ip", "kv_port", "kv_connector_extra_config")
# keys that choose how pages are buffered, and by whom
IGNORED_KEYS = (
    "engine_id", "kv_rank", "kv_parallel_size", "kv_buffer_device", "kv_buffer_size",
    "kv_load_failure_policy", "enable_permute_local_kv",
)  # fmt: skip


def options_from_connector(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a KV connector.

    ExampleConnector is a folder of pages, and OffloadingConnector is host memory. Any other with a role of
    disaggregated prefill uses duetto's transports.

    Raises TypeError for an unknown key, ValueError for a connector that is none of these.
    """
    keys = drop_neutral("kv_transfer", config)
    for key in keys:
        if key not in (*READ_KEYS, *IGNORED_KEYS):
            raise TypeError(
                f"kv_transfer_config: {unknown_name_message('key', key, READ_KEYS, IGNORED_KEYS)}"
            )
    connector, role = keys.get("kv_connector"), keys.get("kv_role")
    extra = keys.get("kv_connector_extra_config") or {}
    if connector == "ExampleConnector" and "shared_storage_path" in extra:
        return {"kv_disk_path": extra["shared_storage_path"], "kv_disk_space": DISK_GIB}
    if connector == "OffloadingConnector" and "cpu_bytes_to_use" in extra:
        return {"swap_space": extra["cpu_bytes_to_use"] / GIB}
    ensure(
        role in DUETTO_ROLES,
        f"kv_transfer_config: {quote(connector)} as {quote(role)} is not supported: set swap_space or "
        f"kv_disk_space for a cache outside the device, or kv_role {' and '.join(DUETTO_ROLES)}",
    )
    address = f"{keys.get('kv_ip', DEFAULT_KV_HOST)}:{keys.get('kv_port', DEFAULT_KV_PORT)}"
    return {"kv_role": DUETTO_ROLES[str(role)], "kv_address": address}


def with_transfer_options(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords with the options of their `kv_transfer_config`.

    Raises TypeError for an option that is given under both names.
    """
    rest = dict(keywords)
    connector_options = (
        options_from_connector(config) if (config := rest.pop("kv_transfer_config", None)) else {}
    )
    for name in connector_options:
        if rest.get(name) not in (None, getattr(EngineOptions, name)):
            raise TypeError(f"{name} is given under two names: kv_transfer_config is the second")
    return rest | connector_options
