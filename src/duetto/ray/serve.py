"""Serving on Ray, in the shape of `ray.serve.llm`.

config = LLMConfig(model_loading_config={"model_id": "qwen", "model_source": "Qwen/Qwen3-0.6B"})
ray.serve.run(build_openai_app({"llm_configs": [config]}))
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ..serve.options.router import RouterOptions
from ..serve.options.server import ServerOptions
from .deployment import EngineReplica
from .group import rank_bundles
from .ingress import make_ingress_class

ENGINE, INGRESS = "engine", "ingress"  # names of the deployments
REPLICA_REQUESTS = 64  # maximum concurrent requests of a replica, as `max_in_flight` of a router
INGRESS_REQUESTS = 1024  # maximum concurrent requests of an ingress replica
DRAIN_SECONDS = 600.0  # timeout in seconds for the last answers of a replica that stops
SERVE_ADDRESSES = ("http://ray-serve",)  # stands for the replicas, whose addresses only Serve knows
# Server options that are not allowed: the ingress has no such routes, or Serve owns the address.
REFUSED_OPTIONS = (
    "host", "port", "served_model_name", "ssl_certfile", "ssl_keyfile", "runtime_lora_updating",
    "profile_dir", "weights_dir", "kv_events_config", "kv_events_endpoint",
)  # fmt: skip


@dataclass(frozen=True)
class LLMConfig:
    """Configuration of a served model, under the names of `ray.serve.llm.LLMConfig`.

    model_loading_config: `model_id`, the name in the API, and `model_source`, a folder or an id on the hub.
    engine_kwargs: keywords of `LLM`; with `nnodes` each replica is a process group in a placement group.
    deployment_config: options of `serve.deployment`, such as `autoscaling_config` and `ray_actor_options`.
    runtime_env: Ray's runtime environment of the replicas.
    server_kwargs: fields of `ServerOptions`.
    router_kwargs: `tokenizer`, `page_size`, `cache_tokens`, `max_attempts` and `resume` of `RouterOptions`.
    target_tokens_in_flight: tokens of unfinished requests that each replica should have, for autoscaling.
    None counts requests, as Serve does.

    Raises ValueError for an option that is not allowed.
    """

    model_loading_config: Mapping[str, str] = field(default_factory=dict)
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    deployment_config: Mapping[str, Any] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] | None = None
    server_kwargs: Mapping[str, Any] = field(default_factory=dict)
    router_kwargs: Mapping[str, Any] = field(default_factory=dict)
    target_tokens_in_flight: int | None = None

    def __post_init__(self):
        for name in REFUSED_OPTIONS:
            if name in self.server_kwargs:
                raise ValueError(f"server_kwargs: {name} is not allowed on Ray Serve")
        target = self.target_tokens_in_flight
        if target is not None and target < 1:
            raise ValueError(f"target_tokens_in_flight {target} is not allowed: 1 or more")
        if target is not None and "autoscaling_config" not in self.deployment_config:
            raise ValueError("target_tokens_in_flight is not allowed without autoscaling_config")
        _ = self.server_options, self.router_options  # validate

    @property
    def server_options(self) -> ServerOptions:
        source = self.model_loading_config.get("model_source", "demo")
        names = [self.model_loading_config.get("model_id", source)]
        return ServerOptions(served_model_name=names, **self.server_kwargs)

    @property
    def router_options(self) -> RouterOptions:
        return RouterOptions(replica=SERVE_ADDRESSES, **self.router_kwargs)

    @property
    def deployment_options(self) -> dict[str, Any]:
        """Return the options of the replicas' deployment."""
        router, deployment = self.router_options, dict(self.deployment_config)
        actor = dict(deployment.pop("ray_actor_options", {}))
        if (nnodes := self.engine_kwargs.get("nnodes", 1)) > 1:
            reserved: dict[str, Any] = {"placement_group_bundles": rank_bundles(nnodes, actor)}
            deployment = reserved | deployment
        if self.runtime_env is not None:
            actor["runtime_env"] = dict(self.runtime_env)
        if self.target_tokens_in_flight is not None:
            policy = {"policy_function": "duetto.ray.autoscaling.desired_replicas"}
            deployment["autoscaling_config"] = {"policy": policy} | dict(deployment["autoscaling_config"])
        placement = {
            "request_router_class": "duetto.ray.request_router.PrefixAffinityRouter",
            "request_router_kwargs": {"cache_pages": router.cache_tokens // router.page_size},
        }
        defaults = {"max_ongoing_requests": REPLICA_REQUESTS, "graceful_shutdown_timeout_s": DRAIN_SECONDS}
        defaults |= {"request_router_config": placement, "ray_actor_options": actor}
        return defaults | deployment


def build_openai_app(llm_serving_args: Mapping[str, Any]) -> Any:
    """Return a Serve application with the routes of `duetto serve`: an ingress, and replicas of an engine.

    The ingress places requests. If a replica is lost, it resumes the answer on another.

    llm_serving_args: `llm_configs`, a list of one LLMConfig or mapping of its fields, and
    `ingress_deployment_config`, options of the ingress.

    Raises ValueError for several models: each is an application with a `route_prefix`.
    """
    configs = list(llm_serving_args["llm_configs"])
    if len(configs) != 1:
        raise ValueError(f"llm_configs is not allowed with {len(configs)} models: one for an application")
    serve = import_module("ray.serve")
    config = configs[0] if isinstance(configs[0], LLMConfig) else LLMConfig(**configs[0])
    engine = serve.deployment(EngineReplica, name=ENGINE, **config.deployment_options)
    replicas = engine.bind(
        config.model_loading_config.get("model_source"),
        dict(config.engine_kwargs),
        config.server_options,
        config.target_tokens_in_flight,
        dict(config.deployment_config.get("ray_actor_options", {})),
    )
    ingress_options = {"max_ongoing_requests": INGRESS_REQUESTS, "graceful_shutdown_timeout_s": DRAIN_SECONDS}
    ingress_options |= dict(llm_serving_args.get("ingress_deployment_config", {}))
    ingress = serve.deployment(
        make_ingress_class(config.router_options, config.server_options), name=INGRESS, **ingress_options
    )
    return ingress.bind(replicas)
