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
from .group import bundles
from .ingress import ingress_class

ENGINE, INGRESS = "engine", "ingress"  # names of the deployments
IN_FLIGHT = 64  # requests of a replica at once, as `max_in_flight` of a router
OF_INGRESS = 1024  # requests of an ingress replica at once
DRAINING = 600.0  # seconds for the last answers of a replica that goes
OF_SERVE = ("http://ray-serve",)  # in place of the replicas' addresses, which Serve knows
# Options whose routes the ingress does not pass on, or which belong to an address.
LEFT_OUT = (
    "host", "port", "served_model_name", "ssl_certfile", "ssl_keyfile", "runtime_lora_updating",
    "profile_dir", "weights_dir", "kv_events_config", "kv_events_endpoint",
)  # fmt: skip


@dataclass(frozen=True)
class LLMConfig:
    """Configuration of a served model, under the names of `ray.serve.llm.LLMConfig`.

    model_loading_config: `model_id`, the name in the API, and `model_source`, a folder or an id on the hub.
    engine_kwargs: keywords of `LLM`; with `nnodes` each replica is a process group in a placement group.
    deployment_config: options of `serve.deployment`, such as `autoscaling_config` and `ray_actor_options`.
    runtime_env: of the replicas. server_kwargs: fields of `ServerOptions`. router_kwargs: `tokenizer`,
    `page_size`, `cache_tokens`, `max_attempts` and `resume` of `RouterOptions`. target_tokens_in_flight:
    tokens of unfinished requests that each replica should have, for autoscaling; None counts requests, as
    Serve does. Raises ValueError for an option that is not allowed.
    """

    model_loading_config: Mapping[str, str] = field(default_factory=dict)
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    deployment_config: Mapping[str, Any] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] | None = None
    server_kwargs: Mapping[str, Any] = field(default_factory=dict)
    router_kwargs: Mapping[str, Any] = field(default_factory=dict)
    target_tokens_in_flight: int | None = None

    def __post_init__(self):
        for name in LEFT_OUT:
            if name in self.server_kwargs:
                raise ValueError(f"server_kwargs: {name} is not allowed on Ray Serve")
        target = self.target_tokens_in_flight
        if target is not None and target < 1:
            raise ValueError(f"target_tokens_in_flight {target} is not allowed: 1 or more")
        if target is not None and "autoscaling_config" not in self.deployment_config:
            raise ValueError("target_tokens_in_flight is not allowed without autoscaling_config")
        _ = self.server, self.router  # raise

    @property
    def server(self) -> ServerOptions:
        source = self.model_loading_config.get("model_source", "demo")
        names = [self.model_loading_config.get("model_id", source)]
        return ServerOptions(served_model_name=names, **self.server_kwargs)

    @property
    def router(self) -> RouterOptions:
        return RouterOptions(replica=OF_SERVE, **self.router_kwargs)

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of the replicas' deployment."""
        router, given = self.router, dict(self.deployment_config)
        actor = dict(given.pop("ray_actor_options", {}))
        if (nnodes := self.engine_kwargs.get("nnodes", 1)) > 1:
            reserved: dict[str, Any] = {"placement_group_bundles": bundles(nnodes, actor)}
            given = reserved | given
        if self.runtime_env is not None:
            actor["runtime_env"] = dict(self.runtime_env)
        if self.target_tokens_in_flight is not None:
            policy = {"policy_function": "duetto.ray.autoscaling.by_tokens_in_flight"}
            given["autoscaling_config"] = {"policy": policy} | dict(given["autoscaling_config"])
        placement = {
            "request_router_class": "duetto.ray.request_router.PrefixAffinityRouter",
            "request_router_kwargs": {"cache_pages": router.cache_tokens // router.page_size},
        }
        own = {"max_ongoing_requests": IN_FLIGHT, "graceful_shutdown_timeout_s": DRAINING}
        own |= {"request_router_config": placement, "ray_actor_options": actor}
        return own | given


def build_openai_app(llm_serving_args: Mapping[str, Any]) -> Any:
    """Return a Serve application with the routes of `duetto serve`: replicas of an engine behind an ingress
    that places requests and resumes the answers of a lost replica on another.

    llm_serving_args: `llm_configs`, a list of one LLMConfig or mapping of its fields, and
    `ingress_deployment_config`, options of the ingress. Raises ValueError for several models: each is an
    application with a `route_prefix`.
    """
    configs = list(llm_serving_args["llm_configs"])
    if len(configs) != 1:
        raise ValueError(f"llm_configs is not allowed with {len(configs)} models: one for an application")
    serve = import_module("ray.serve")
    config = configs[0] if isinstance(configs[0], LLMConfig) else LLMConfig(**configs[0])
    engine = serve.deployment(EngineReplica, name=ENGINE, **config.engine_options)
    replicas = engine.bind(
        config.model_loading_config.get("model_source"),
        dict(config.engine_kwargs),
        config.server,
        config.target_tokens_in_flight,
        dict(config.deployment_config.get("ray_actor_options", {})),
    )
    own = {"max_ongoing_requests": OF_INGRESS, "graceful_shutdown_timeout_s": DRAINING}
    own |= dict(llm_serving_args.get("ingress_deployment_config", {}))
    ingress = serve.deployment(ingress_class(config.router, config.server), name=INGRESS, **own)
    return ingress.bind(replicas)
