"""How a server is reached, and what it lets its clients ask for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...fields import knob
from ...refusals import shown

ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\s*]+")  # as browsers send it
HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
ENDPOINT = re.compile(r"https?://[^/]")


@dataclass(frozen=True)
class ServerOptions:
    """Address and limits, by default as a public address wants them. Raises ValueError for what is not
    allowed."""

    host: str = knob("127.0.0.1", "address to listen on; 0.0.0.0 is every one of this machine")
    port: int = knob(8000, "port to listen on; 0 takes a free one")
    served_model_name: Sequence[str] | None = knob(
        None, "name of the model for clients, repeatable; default: that of --model"
    )
    api_key_file: str | None = knob(
        None, "file with a key on each line, one of which clients have to send; default: none is asked for"
    )
    allowed_origins: Sequence[str] | None = knob(
        None,
        "origin of pages elsewhere that may ask from a browser, as https://chat.example, or *; repeatable; "
        "default: none",
    )
    allowed_hosts: Sequence[str] | None = knob(
        None,
        "name that the server is asked as, as chat.example, or *.example, or *; repeatable; addresses and "
        "localhost always are; default: on a loopback address no other name, elsewhere any",
    )
    tool_call_parser: str | None = knob(
        None, "notation of the model's calls of tools, as hermes; default: that of its chat template"
    )
    enable_auto_tool_choice: bool = knob(True, "as always here: the model may call tools that it is given")
    max_queued: int = knob(
        256, "completions that may wait for their first token; more are answered with 429 and Retry-After"
    )
    max_wait: float = knob(600.0, "seconds until a request's first token; then it ends with 503")
    max_body: int = knob(8 << 20, "bytes of a request's body")
    receive_timeout: float = knob(
        30.0,
        "seconds that a request's head, and its body, may take to arrive, and that a client may stop reading",
    )
    max_unread: int = knob(
        4096, "pieces of a stream that may wait for its reader; then the stream ends with an error"
    )
    ping: float = knob(15.0, "seconds of silence after which a stream sends a comment, to be kept open")
    runtime_lora_updating: bool = knob(
        False,
        "let clients load adapters from folders of this machine and unload them, by POST "
        "/v1/load_lora_adapter and /v1/unload_lora_adapter",
    )
    profile_dir: str | None = knob(
        None, "folder for profiles, by POST /start_profile and /stop_profile; default: these are not there"
    )
    weights_dir: str | None = knob(
        None, "folder in which POST /update_weights finds models to serve from then on, beside /pause and "
        "/resume; default: these are not there",
    )  # fmt: skip
    otlp_traces_endpoint: str | None = knob(
        None, "where a span of each request goes, by OTLP over HTTP, as http://localhost:4318/v1/traces"
    )
    kv_events_config: Mapping[str, Any] | None = knob(
        None, 'where the cache tells of its pages over ZeroMQ, as {"enable_kv_cache_events": true, '
        '"endpoint": "tcp://*:5557", "topic": ""}; needs duetto[events]',
    )  # fmt: skip
    kv_events_endpoint: str | None = knob(None, "the same with this endpoint")
    ssl_certfile: str | None = knob(None, "certificate, for https")
    ssl_keyfile: str | None = knob(None, "its private key")

    def __post_init__(self):
        for name in ("max_queued", "max_wait", "max_body", "receive_timeout", "max_unread", "ping"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {shown(getattr(self, name))} is not allowed: more than 0")
        if not self.enable_auto_tool_choice:
            raise ValueError("enable_auto_tool_choice False is not allowed: requests say tool_choice none")
        if not self.host:
            raise ValueError("host '' is not allowed: an address or a name; 0.0.0.0 is every one")
        if not all(self.served_model_name or ["demo"]):
            raise ValueError("served_model_name '' is not allowed: a name")
        for origin in self.allowed_origins or ():
            if not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins {shown(origin)} is not allowed: scheme://host[:port], or *"
                )
        for name in self.allowed_hosts or ():
            if not HOST.fullmatch(name):
                raise ValueError(
                    f"allowed_hosts {shown(name)} is not allowed: a name without a port, *.name, or *"
                )
        if self.otlp_traces_endpoint and not ENDPOINT.match(self.otlp_traces_endpoint):
            endpoint = shown(self.otlp_traces_endpoint)
            raise ValueError(f"otlp_traces_endpoint {endpoint} is not allowed: http:// or https://")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port {self.port} is not allowed: 0 to {(1 << 16) - 1}")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError("ssl_keyfile is not allowed without ssl_certfile")
