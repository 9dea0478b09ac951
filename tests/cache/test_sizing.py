"""How many blocks are planned, what a refusal says, and free memory as control groups leave it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from specserve.cache.sizing import GIB, MAX_SHARE, free_memory, plan_blocks, share_of
from specserve.errors import CapacityError

MIB = 2**20


def test_takes_what_all_sequences_could_use() -> None:
    num_blocks, sentence = plan_blocks(100 * GIB, MIB, 16, 1000, 4, None)
    assert num_blocks == 4 * 63 + 1
    assert "4032 tokens" in sentence
    assert "all sequences at full length" in sentence


def test_takes_at_most_its_share_of_free_memory() -> None:
    num_blocks, sentence = plan_blocks(1000 * MIB, MIB, 16, 1600, 64, None)
    assert num_blocks == 400
    assert "40% of free memory" in sentence


def test_an_explicit_size_is_taken_as_given() -> None:
    num_blocks, sentence = plan_blocks(4 * GIB, MIB, 16, 160, 1, 2.0)
    assert num_blocks == 2048
    assert "kv_cache_gib" in sentence


def test_more_than_is_free_names_the_largest_value_and_it_works() -> None:
    free = 3 * GIB + 123456789
    with pytest.raises(CapacityError, match=r"kv_cache_gib is 8 and 3\.11 GiB are free") as refused:
        plan_blocks(free, MIB, 16, 160, 1, 8.0)
    largest = float(re.search(r"works now is ([\d.]+);", str(refused.value)).group(1))  # type: ignore[union-attr]
    assert plan_blocks(free, MIB, 16, 160, 1, largest)[0] > 3000


@given(
    free=st.integers(1, 64 * GIB),
    per_block=st.integers(1024, 64 * MIB),
    max_len=st.integers(1, 200_000),
    max_seqs=st.integers(1, 256),
    gib=st.none() | st.floats(1e-4, 128),
)
def test_a_plan_fits_or_its_refusal_names_what_works(
    free: int, per_block: int, max_len: int, max_seqs: int, gib: float | None
) -> None:
    try:
        num_blocks, _ = plan_blocks(free, per_block, 16, max_len, max_seqs, gib)
    except CapacityError as error:
        _check_remedies(str(error), free, per_block, max_seqs, gib, max_len)
        return
    assert (num_blocks - 1) * 16 >= max_len
    assert num_blocks * per_block <= (free * MAX_SHARE if gib is None else min(free, gib * GIB))
    if gib is None:
        assert num_blocks - 1 <= max_seqs * -(-max_len // 16)


def _check_remedies(message: str, free: int, per_block: int, max_seqs: int, gib: float | None, max_len: int) -> None:
    shorter = re.search(r"max_model_len that works is (\d+)", message)
    larger = re.search(r"set kv_cache_gib to at least ([\d.]+)\.$", message)
    assert message.endswith(".")
    if shorter:
        limit = int(shorter.group(1))
        assert 0 < limit < max_len
        plan_blocks(free, per_block, 16, limit, max_seqs, gib)
        with pytest.raises(CapacityError):
            plan_blocks(free, per_block, 16, limit + 1, max_seqs, gib)
    if larger:
        plan_blocks(free, per_block, 16, max_len, max_seqs, float(larger.group(1)))


# --- free memory ----------------------------------------------------------------------------------------------------


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable:    8000000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


AVAILABLE = 8_000_000 * 1024


def test_without_control_groups_what_the_system_has(tmp_path: Path) -> None:
    assert free_memory("cpu", write(tmp_path, {})) == AVAILABLE


def test_version_two_limits_of_the_group_and_its_parents(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user/app"
    files = {
        "proc/self/cgroup": "0::/user/app",
        f"{group}/memory.max": "max",
        f"{group}/memory.current": 1000,
        "sys/fs/cgroup/user/memory.max": 5000,
        "sys/fs/cgroup/user/memory.current": 3500,
        "sys/fs/cgroup/user/memory.stat": "anon 1\ninactive_file 700\nactive_file 9",
    }
    assert free_memory("cpu", write(tmp_path, files)) == 5000 - 3500 + 700


def test_version_one_seen_from_inside_a_container(tmp_path: Path) -> None:
    """The listing names the host's path, which does not exist inside: the mount itself is the group."""
    group = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "9:name=systemd:/x\n4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc",
        f"{group}/memory.limit_in_bytes": 4096,
        f"{group}/memory.usage_in_bytes": 4000,
        f"{group}/memory.stat": "inactive_file 1\ntotal_inactive_file 96",
    }
    assert free_memory("cpu", write(tmp_path, files)) == 4096 - 4000 + 96


def test_version_one_without_a_limit(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/app"
    files = {
        "proc/self/cgroup": "3:memory:/app",
        f"{group}/memory.limit_in_bytes": 9223372036854771712,
        f"{group}/memory.usage_in_bytes": 4000,
        f"{group}/memory.stat": "total_rss 1",
    }
    assert free_memory("cpu", write(tmp_path, files)) == AVAILABLE


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": 100,
        "sys/fs/cgroup/memory.current": 120,
        "sys/fs/cgroup/memory.stat": "anon 120",
    }
    assert free_memory("cpu", write(tmp_path, files)) == 0


def test_where_the_system_does_not_tell_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="cannot be measured"):
        free_memory("cpu", tmp_path)


def test_this_machine_has_some_memory() -> None:
    assert free_memory("cpu") > MIB


def test_engines_share_what_is_free(tmp_path: Path) -> None:
    """Each of the others will need what this one has committed by now, and all of them their steps."""
    assert share_of(1000 * MIB, 100 * MIB, 1) == 900 * MIB
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Name:\tpython\nVmRSS:\t  400000 kB\nRssAnon:\t  204800 kB\n")
    assert share_of(1400 * MIB, 100 * MIB, 3, tmp_path) == (1000 // 3) * MIB - 100 * MIB + MIB // 3
    assert share_of(300 * MIB, 100 * MIB, 3, tmp_path) == 0
    assert 0 < share_of(2**40, 0, 2) < 2**39, "of this process"
