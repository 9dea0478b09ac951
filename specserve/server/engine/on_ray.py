"""A server whose engines run on the nodes of a Ray cluster: what it needs for it, and what they are told."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from specserve.cluster.certificates import Issued, issue, make_authority
from specserve.cluster.launcher import Plan
from specserve.cluster.ray_launcher import RayLauncher, check
from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.machine.cores import default_threads
from specserve.server.engine.launched import Launched
from specserve.server.engine.ray_actor import ActorSettings, RayEngine, in_memory
from specserve.server.options import ServeOptions
from specserve.server.scale_options import ScaleOptions


@contextmanager
def on_ray(
    engine: Mapping[str, Any], options: ServeOptions, scale: ScaleOptions
) -> Iterator[tuple[ServeOptions, Launched]]:
    """The options of a server that can speak to its engines, and the membership of their group. `engine` are
    EngineConfig's fields, and engines find its model under the name that it has there. Secret, authority and
    certificates are new. Raises ConfigError."""
    if options.data_parallel_size > 1:
        raise ConfigError("--data-parallel-size is for engines on this machine. Give --replicas with --backend ray.")
    if options.engine:
        raise ConfigError("--engine names engines that somebody else has started. Leave it out with --backend ray.")
    check(scale.ray_address)
    secret, authority = secrets.token_hex(32), make_authority()
    own = issue(authority, "specserve-server")
    with in_memory(secret, authority.certificate, own.certificate, own.key) as (secret_file, ca, cert, key):
        files: dict[str, Any] = {"engine_secret_file": secret_file, "engine_ca": ca, "engine_cert": cert}
        plan = plan_of(engine, options, scale, secret, authority)
        yield replace(options, **files, engine_key=key), Launched(lambda: RayLauncher(plan), scale.scaling)


def plan_of(
    engine: Mapping[str, Any], options: ServeOptions, scale: ScaleOptions, secret: str, authority: Issued
) -> Plan:
    """What each engine needs: a CPU for each thread of each of its processes, and a GPU for each that is told to use
    one. Where nothing is said of threads an engine has as many as this machine has cores."""
    config = EngineConfig(**engine)
    num_ranks = config.tensor_parallel_size
    threads = config.threads or max(1, default_threads() // num_ranks)
    gpus = int(config.device.startswith("cuda"))
    told = {**engine, "threads": threads, "device": "cuda" if gpus else "cpu"}  # Ray chooses which
    settings = ActorSettings(told, secret, authority, options.start_timeout_s, options.stall_timeout_s)
    return Plan(
        cluster=scale.ray_address,
        actor=f"{RayEngine.__module__}:{RayEngine.__qualname__}",
        settings=msgspec.json.encode(settings).decode(),
        cpus=threads,
        gpus=gpus,
        num_ranks=num_ranks,
    )
