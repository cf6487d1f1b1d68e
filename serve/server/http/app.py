"""The paths of the server."""

from starlette.applications import Starlette
from starlette.middleware import Middleware

from ..routes import completions
from ..routes.adapters import Adapters
from ..routes.embeddings import Embeddings
from ..routes.openapi import ApiPage
from ..routes.profile import Profile
from ..routes.state import ServerState
from ..routes.tokens import TokenRoutes
from ..routes.weights import Weights
from ..service.service import Service
from .lifecycle import guarded_app
from .tracing import Traced, Tracing


def app(service: Service, keys: list[str], tracing: Tracing | None) -> Starlette:
    """Everything that a service answers; with keys, to those who have one."""
    paths = [*completions.paths(service), *Embeddings(service).paths, *TokenRoutes(service).paths]
    paths += ServerState(service).paths
    if service.options.runtime_lora_updating:
        paths += Adapters(service).paths
    if service.options.profile_dir is not None:
        paths += Profile(service, service.options.profile_dir).paths
    if service.options.weights_dir is not None:
        paths += Weights(service, service.options.weights_dir).paths
    paths += ApiPage(paths, has_keys=bool(keys)).paths
    open = [path.path for path in paths if path.is_open]
    inner = [] if tracing is None else [Middleware(Traced, tracing=tracing)]
    return guarded_app([path.route for path in paths], service.options, keys, open, inner)
