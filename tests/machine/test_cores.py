"""Cores an engine may use, on made-up control groups of version 1 and 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specserve.errors import ConfigError
from specserve.machine.cores import THREADS, default_threads, usable_cores

CORES = 16
V2 = "30 1 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct"
SYSTEMD = "31 30 0:27 / /sys/fs/cgroup/systemd rw shared:5 - cgroup cgroup rw,xattr,name=systemd"
ROOT_DISK = "25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro"


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))


def cores(root: Path, groups: str, mounts: list[str] | None, **files: str) -> int:
    """usable_cores of a made-up tree; `files` are below /sys/fs/cgroup."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(groups)
    if mounts is not None:
        (proc / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return usable_cores(root)


def test_without_a_quota_it_is_the_affinity(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == CORES
    assert cores(tmp_path, "0::/user.slice\n", [V2], **{"user.slice/cpu.max": "max 100000"}) == CORES


@pytest.mark.parametrize(("quota", "expected"), [("200000 100000", 2), ("250000 100000", 3), ("5000 100000", 1)])
def test_systemds_quota_of_a_service_in_a_slice(tmp_path: Path, quota: str, expected: int) -> None:
    """CPUQuota= of a unit: its own group, below a slice without a limit; a part of a core counts as one."""
    files = {"system.slice/specserve.service/cpu.max": quota, "system.slice/cpu.max": "max 100000"}
    assert cores(tmp_path, "0::/system.slice/specserve.service\n", [ROOT_DISK, V2], **files) == expected


def test_the_tightest_of_nested_groups_wins(tmp_path: Path) -> None:
    files = {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000", "a/b/c/cpu.max": "900000 100000"}
    assert cores(tmp_path, "0::/a/b/c\n", [V2], **files, **{"x/cpu.max": "100000 100000"}) == 3


def test_a_quota_never_gives_more_than_the_affinity(tmp_path: Path) -> None:
    assert cores(tmp_path, "0::/\n", [V2], **{"cpu.max": "6400000 100000"}) == CORES


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    assert cores(tmp_path, "0::/\n", [V2], **{"cpu.max": "150000 100000"}) == 2


def test_a_container_whose_mount_is_the_hosts_group(tmp_path: Path) -> None:
    """Version 1 without a namespace: the path is the host's, and the mount begins at that very group."""
    mount = V1.replace(" / /sys", " /docker/abc /sys")
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "400000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    inner = {"cpu,cpuacct/in/cpu.cfs_quota_us": "50000", "cpu,cpuacct/in/cpu.cfs_period_us": "100000"}
    assert cores(tmp_path / "a", "4:cpu,cpuacct:/docker/abc\n", [SYSTEMD, mount], **files) == 4
    assert cores(tmp_path / "b", "4:cpu,cpuacct:/docker/abc/in\n", [SYSTEMD, mount], **files, **inner) == 1


@pytest.mark.parametrize("path", ["/elsewhere/abc", "/../../abc"])
def test_a_group_outside_of_what_is_mounted(tmp_path: Path, path: str) -> None:
    assert cores(tmp_path, f"0::{path}\n", [V2.replace(" / /sys", " /docker /sys")], **{"cpu.max": "7 2"}) == 4


def test_version_one_in_nested_groups(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/a/cpu.cfs_quota_us": "250000",
        "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
    }
    groups = "9:name=systemd:/user.slice\n4:cpu,cpuacct:/a/b\n2:cpuset:/x\n"
    assert cores(tmp_path, groups, [ROOT_DISK, SYSTEMD, V1], **files) == 3


def test_both_versions_at_once(tmp_path: Path) -> None:
    """systemd's hybrid setup: version 2 is there without controllers, beside version 1."""
    unified = V2.replace("/sys/fs/cgroup rw", "/sys/fs/cgroup/unified rw")
    files = {"cpu,cpuacct/a/cpu.cfs_quota_us": "200000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}
    assert cores(tmp_path, "4:cpu,cpuacct:/a\n0::/a\n", [unified, V1], **files, **{"unified/a/cgroup.procs": "1"}) == 2


def test_a_mount_point_with_a_space(tmp_path: Path) -> None:
    mount = V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/my\\040groups ")
    assert cores(tmp_path, "0::/a\n", [mount], **{"my groups/a/cpu.max": "200000 100000"}) == 2


def test_without_a_mount_table_the_usual_places(tmp_path: Path) -> None:
    one = {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}
    assert cores(tmp_path / "one", "4:cpu,cpuacct:/a\n", None, **one) == 2
    assert cores(tmp_path / "two", "0::/a\n", None, **{"a/cpu.max": "300000 100000"}) == 3


@pytest.mark.parametrize(
    "quota", ["", "max", "100000", "many 100000", "100000 0", "0 100000", "-1 100000", "1 2 3", "\ufeff"]
)
def test_a_quota_that_cannot_be_read_limits_nothing(tmp_path: Path, quota: str) -> None:
    files = {"a/cpu.max": quota, "cpu.max": "500000 100000"}
    assert cores(tmp_path, "0::/a\n", [V2], **files) == 5, "the others still count"


def test_listings_that_cannot_be_read_limit_nothing(tmp_path: Path) -> None:
    assert cores(tmp_path, "garbage\n0:\n\n::\n", ["", "a b c", "1 2 3 4 5 - cgroup2", " - "]) == CORES


def test_threads_are_those_of_the_environment_or_one_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, found in (("3", 3), ("", usable_cores())):
        monkeypatch.setenv(THREADS, said)
        assert default_threads() == found
    for wrong in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv(THREADS, wrong)
        with pytest.raises(ConfigError, match=f"SPECSERVE_THREADS is '{wrong}'"):
            default_threads()


def test_this_machine() -> None:
    assert 1 <= usable_cores() <= CORES
