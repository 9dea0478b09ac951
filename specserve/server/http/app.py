"""The application: which path leads where, and what every request passes."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Middleware

from specserve.errors import ConfigError
from specserve.server.http.context import CONTEXT, Context
from specserve.server.http.middleware import add_headers, cross_origin, keys_required, translate_errors
from specserve.server.http.origin import known_hosts_only
from specserve.server.http.routes import ROUTES

PUBLIC = frozenset(route.handler for route in ROUTES if not route.needs_key)


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
    middlewares: list[Middleware] = [translate_errors]
    if (hosts := known_hosts_only(options)) is not None:
        middlewares.append(hosts)
    if options.cors_origin:
        middlewares.append(cross_origin(options.cors_origin))
    if keys := options.keys():
        middlewares.append(keys_required(keys, PUBLIC))
    app = web.Application(middlewares=middlewares, client_max_size=options.max_body_bytes)
    app[CONTEXT] = server
    app.on_response_prepare.append(add_headers)
    for root in dict.fromkeys(["", options.root_path]):  # a proxy may leave it in front, or take it away
        # A name in a path may hold slashes.
        app.add_routes([web.route(r.method, root + r.path.replace("}", ":.+}"), r.handler) for r in ROUTES])
    return app
