"""The application: which path leads where, and what every request passes. Knows no socket."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Middleware

from specserve.errors import ConfigError
from specserve.server.http import completions, documents, info, tokens, translated
from specserve.server.http.context import CONTEXT, Context
from specserve.server.http.middleware import add_headers, cross_origin, keys_required, tell
from specserve.server.http.origin import known_hosts_only

ROUTES = (
    web.post("/v1/chat/completions", completions.chat),
    web.post("/v1/completions", completions.completions),
    web.post("/v1/messages", translated.messages),
    web.post("/v1/messages/count_tokens", translated.count_tokens),
    web.post("/v1/responses", translated.responses),
    web.get("/v1/models", info.models),
    web.get("/v1/models/{id:.+}", info.model),
    web.post("/tokenize", tokens.tokenize),
    web.post("/detokenize", tokens.detokenize),
    web.get("/tokenizer_info", tokens.tokenizer_info),
    web.get("/openapi.json", documents.openapi),
    web.get("/docs", documents.docs),
    web.get("/", documents.playground),
    web.get("/live", info.live),
    web.get("/health", info.health),
    web.get("/ready", info.health),
    web.get("/metrics", info.metrics),
    web.get("/stats", info.stats),
    web.get("/version", info.version),
    web.get("/server_info", info.server_info),
    web.post("/reset_prefix_cache", info.reset_prefix_cache),
)
PUBLIC = frozenset({info.live, info.health, documents.docs, documents.playground})  # needs no key


def check_root_path(root: str) -> None:
    """Raises ConfigError for a path of which nobody could tell whether it stands before a route or is part of one."""
    if not root:
        return
    for path in (route.path.partition("/{")[0] for route in ROUTES if route.path != "/"):
        if f"{path}/".startswith(f"{root}/") or f"{root}/".startswith(f"{path}/"):
            raise ConfigError(
                f"--root-path is {root!r}, and this server has {path} itself; it must be another path, such as /llm."
            )


def make_app(server: Context) -> web.Application:
    """Raises ConfigError for a file of keys that cannot be read."""
    options = server.options
    middlewares: list[Middleware] = [tell]
    if (hosts := known_hosts_only(options)) is not None:
        middlewares.append(hosts)
    if options.cors_origin:
        middlewares.append(cross_origin(options.cors_origin))
    if keys := options.keys():
        middlewares.append(keys_required(keys, PUBLIC))
    app = web.Application(middlewares=middlewares, client_max_size=options.max_body_bytes)
    app[CONTEXT] = server
    app.on_response_prepare.append(add_headers)
    app.add_routes(ROUTES)
    if options.root_path:  # a proxy may leave it in front, or take it away
        app.add_routes([web.route(r.method, options.root_path + r.path, r.handler, **r.kwargs) for r in ROUTES])
    return app
