"""Options of the HTTP server: its address, and limits for its clients."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...option_fields import knob
from ...refusals import check_positive, ensure, quote

ORIGIN_PATTERN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\s*]+")  # as browsers send it
HOST_PATTERN = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
ISOLATIONS = ("none", "key")  # of cached prompts
ENDPOINT_PATTERN = re.compile(r"https?://[^/]")


@dataclass(frozen=True)
class ServerOptions:
    """Address and limits; the defaults suit a public address. Raises ValueError for a value that is not
    allowed."""

    host: str = knob("127.0.0.1", "address to listen on; 0.0.0.0 is every address of this machine")
    port: int = knob(8000, "port to listen on; 0 selects a free port")
    served_model_name: Sequence[str] | None = knob(
        None, "name of the model in the API; default: the value of --model"
    )
    api_key_file: str | None = knob(
        None, "file with one API key a line, of which clients must send one; default: none is required"
    )
    prefix_cache_isolation: str = knob(
        "none",
        "isolation of cached prompts besides cache_salt: key (clients of one API key share them), or none",
    )
    allowed_origins: Sequence[str] | None = knob(
        None, "web origin whose pages may send requests (CORS), as https://chat.example, or *; default: none"
    )
    allowed_hosts: Sequence[str] | None = knob(
        None,
        "allowed Host header, as chat.example, *.example, or *, besides addresses and localhost; default: "
        "none on a loopback address, any elsewhere",
    )
    tool_call_parser: str | None = knob(
        None, "format of the model's tool calls, as hermes; default: that of its chat template"
    )
    enable_auto_tool_choice: bool = knob(True, "the model may call the tools of a request; always on")
    max_queued: int = knob(
        256, "maximum completions that wait for their first token; others get 429 and Retry-After"
    )
    queue_timeout: float = knob(
        600.0, "seconds that a request waits for its first token; then 503", formerly="max_wait"
    )
    max_body: int = knob(8 << 20, "maximum bytes of a request's body")
    receive_timeout: float = knob(
        30.0, "seconds for receiving a request's head, and its body, and for a client that stops reading"
    )
    max_stream_backlog: int = knob(
        4096,
        "maximum tokens of a stream that the client has yet to read; then it ends with an error",
        formerly="max_unread",
    )
    keepalive_interval: float = knob(
        15.0, "seconds without data after which a stream sends a comment", formerly="ping"
    )
    runtime_lora_updating: bool = knob(
        False,
        "let clients load LoRA adapters from folders of this machine and unload them, by POST "
        "/v1/load_lora_adapter and /v1/unload_lora_adapter",
    )
    profile_dir: str | None = knob(None, "folder for profiles; enables POST /start_profile and /stop_profile")
    weights_dir: str | None = knob(
        None, "folder of models for POST /update_weights; enables it, /pause and /resume"
    )
    otlp_traces_endpoint: str | None = knob(
        None, "OTLP endpoint for a span of each request, as http://localhost:4318/v1/traces"
    )
    kv_events_config: Mapping[str, Any] | None = knob(
        None,
        'publish KV cache events over ZeroMQ, as {"enable_kv_cache_events": true, "endpoint": '
        '"tcp://*:5557", "topic": ""}; needs duetto[events]',
    )
    kv_events_endpoint: str | None = knob(None, "endpoint of the KV cache events; enables them")
    ssl_certfile: str | None = knob(None, "TLS certificate; enables https")
    ssl_keyfile: str | None = knob(None, "private key of the TLS certificate")

    def __post_init__(self):
        limits = "max_queued", "queue_timeout", "max_body", "receive_timeout"
        check_positive(self, (*limits, "max_stream_backlog", "keepalive_interval"))
        auto, names, trace = self.enable_auto_tool_choice, self.served_model_name, self.otlp_traces_endpoint
        ensure(auto, "enable_auto_tool_choice False is not allowed: requests say tool_choice none")
        ensure(self.host != "", "host '' is not allowed: an address or a name; 0.0.0.0 is every one")
        ensure(all(names or ["demo"]), "served_model_name '' is not allowed: a name")
        isolation, is_keyed = self.prefix_cache_isolation, self.api_key_file is not None
        refusal = f"prefix_cache_isolation {quote(isolation)} is not allowed"
        ensure(isolation in ISOLATIONS, f"{refusal}: {' or '.join(ISOLATIONS)}")
        ensure(isolation == "none" or is_keyed, f"{refusal} without api_key_file: clients have no keys")
        for origin in self.allowed_origins or ():
            refusal = f"allowed_origins {quote(origin)} is not allowed: scheme://host[:port], or *"
            ensure(ORIGIN_PATTERN.fullmatch(origin) is not None, refusal)
        for name in self.allowed_hosts or ():
            refusal = f"allowed_hosts {quote(name)} is not allowed: a name without a port, *.name, or *"
            ensure(HOST_PATTERN.fullmatch(name) is not None, refusal)
        is_address = not trace or ENDPOINT_PATTERN.match(trace) is not None
        ensure(is_address, f"otlp_traces_endpoint {quote(trace)} is not allowed: http:// or https://")
        ensure(0 <= self.port < 1 << 16, f"port {self.port} is not allowed: 0 to {(1 << 16) - 1}")
        is_whole = not self.ssl_keyfile or bool(self.ssl_certfile)
        ensure(is_whole, "ssl_keyfile is not allowed without ssl_certfile")
