"""What a server is told at start of the engines that it has started elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from specserve.cluster.autoscaling import Scaling
from specserve.errors import ConfigError, strict_fields, unknown
from specserve.help import Help
from specserve.server.options import MOST_REPLICAS

BACKENDS = ("local", "ray")


@strict_fields("option", ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """`backend`: engines run on this machine ("local"), or on the nodes of a Ray cluster ("ray"). There are `replicas`
    of them (1 where nothing is said), or from `min_replicas` to `max_replicas`: as many as let a request wait for
    `target_wait_ms` milliseconds. `ray_address` is HOST:PORT of the cluster's head, "auto" is the cluster that this
    machine belongs to. Raises ConfigError naming the field, what it was and what is allowed."""

    backend: Annotated[
        Literal["local", "ray"],
        Help("Where engines run: local is this machine; ray is a Ray cluster (pip install 'specserve[ray]')."),
    ] = "local"
    replicas: Annotated[int | None, Help("Engines on the Ray cluster [default: 1].")] = None
    min_replicas: Annotated[int | None, Help("Fewest engines on the Ray cluster, in place of --replicas.")] = None
    max_replicas: Annotated[int | None, Help("Most engines on the Ray cluster, in place of --replicas.")] = None
    target_wait_ms: Annotated[
        float, Help("Expected wait of a request above which there are more engines, up to --max-replicas.")
    ] = 1000.0
    ray_address: Annotated[
        str, Help("Head of the Ray cluster, HOST:PORT; auto is the one that this machine belongs to.")
    ] = "auto"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError("--backend: " + unknown("value", str(self.backend), BACKENDS))
        for name in ("replicas", "min_replicas", "max_replicas"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not 1 <= value <= MOST_REPLICAS):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1 to {MOST_REPLICAS}.")
        if not 1 <= self.target_wait_ms <= 1e6:
            raise ConfigError(f"target_wait_ms is {self.target_wait_ms!r}; it must be a number from 1 to 1000000.")
        if self.backend == "local":
            self._check_unused()
        if (self.min_replicas is None) != (self.max_replicas is None):
            raise ConfigError("--min-replicas and --max-replicas belong together. Give both or none of them.")
        if self.replicas is not None and self.max_replicas is not None:
            raise ConfigError("--replicas is a number that does not change. Leave it out with --max-replicas.")
        if self.min_replicas is not None and self.max_replicas is not None and self.min_replicas > self.max_replicas:
            raise ConfigError(f"--min-replicas {self.min_replicas} is more than --max-replicas {self.max_replicas}.")

    @property
    def scaling(self) -> Scaling:
        least = self.min_replicas or self.replicas or 1
        return Scaling(least, self.max_replicas or least, self.target_wait_ms)

    def _check_unused(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) != entry.default:
                option = f"--{entry.name.replace('_', '-')}"
                more = " For several engines on this machine give --data-parallel-size." if "ray" not in option else ""
                raise ConfigError(f"{option} is for engines on a Ray cluster: give --backend ray.{more}")
