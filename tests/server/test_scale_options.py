"""What a server is told of engines on a Ray cluster, and what becomes of it: how many there are, what each needs."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import msgspec
import pytest

from specserve.cluster.autoscaling import Scaling
from specserve.cluster.certificates import Issued
from specserve.cluster.ray_launcher import check
from specserve.errors import ConfigError
from specserve.server.engine.on_ray import plan_of
from specserve.server.engine.ray_actor import ActorSettings
from specserve.server.options import ServeOptions
from specserve.server.scale_options import ScaleOptions

AUTHORITY = Issued("CERTIFICATE", "KEY")


def plan(engine: dict[str, Any], **scale: Any) -> Any:
    return plan_of(
        {"model": "m", **engine}, ServeOptions(), ScaleOptions(backend="ray", **scale), "a secret", AUTHORITY
    )


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({}, 1, 1),
        ({"replicas": 3}, 3, 3),
        ({"min_replicas": 2, "max_replicas": 5}, 2, 5),
        ({"min_replicas": 2, "max_replicas": 2}, 2, 2),
    ],
)
def test_there_are_as_many_engines_as_asked_for(options: dict[str, int], least: int, most: int) -> None:
    assert ScaleOptions(backend="ray", target_wait_ms=250, **options).scaling == Scaling(least, most, 250)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "rays"}, "--backend"),
        (
            {"replicas": 2},
            "--replicas is for engines on a Ray cluster: give --backend ray. For several engines",
        ),
        ({"ray_address": "a:1"}, "--ray-address is for engines on a Ray cluster"),
        ({"target_wait_ms": 5}, "--target-wait-ms is for"),
        ({"backend": "ray", "replicas": 0}, "replicas is 0; it must be a whole number from 1 to 64"),
        ({"backend": "ray", "replicas": 65}, "replicas is 65"),
        ({"backend": "ray", "replicas": 1.5}, "replicas is 1.5"),
        ({"backend": "ray", "max_replicas": 2}, "belong together"),
        ({"backend": "ray", "min_replicas": 2}, "belong together"),
        ({"backend": "ray", "min_replicas": 3, "max_replicas": 2}, "--min-replicas 3 is more than --max-replicas 2"),
        ({"backend": "ray", "replicas": 2, "min_replicas": 1, "max_replicas": 2}, "Leave it out with --max-replicas"),
        ({"backend": "ray", "target_wait_ms": 0}, "target_wait_ms is 0"),
        ({"backend": "ray", "target_wait_ms": float("nan")}, "target_wait_ms is nan"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ScaleOptions(**options)
    assert text in str(refused.value)


def test_an_engine_needs_a_cpu_for_each_thread_of_each_of_its_processes() -> None:
    found = plan({"threads": 3, "tensor_parallel_size": 2})
    assert (found.cpus, found.gpus, found.num_ranks) == (3, 0, 2)
    settings = msgspec.json.decode(found.settings, type=ActorSettings)
    assert (settings.options["threads"], settings.options["device"]) == (3, "cpu")
    assert (settings.secret, settings.authority) == ("a secret", AUTHORITY)


def test_an_engine_of_a_gpu_is_given_one_that_ray_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan({"threads": 1, "device": "cuda:1"})
    assert (found.cpus, found.gpus) == (1, 1)
    assert json.loads(found.settings)["options"]["device"] == "cuda"
    monkeypatch.setenv("SPECSERVE_THREADS", "6")
    assert plan({"tensor_parallel_size": 2}).cpus == 3


def test_a_start_without_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'specserve\[ray\]'"):
        check("auto")
