"""The store of the suffix drafter in a file: what comes back, for whom, and what becomes of a file that is damaged, of
another model, written by two, or not written to its end."""

from __future__ import annotations

import itertools
import random
import signal
import stat
import subprocess
import sys
import threading
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings, strategies as st

from specserve.bench.drive import Driver
from specserve.checkpoint import textstore
from specserve.checkpoint.textfile import TextFile, new_key
from specserve.config import EngineConfig
from specserve.drafters.suffix import SuffixDrafter
from specserve.engine.build import build
from specserve.engine.request import Request
from specserve.errors import ConfigError
from specserve.speculation.base import DraftContext
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams, Sequence, SequenceStats

TARGET = {"vocab_size": 100, "hidden_size": 8, "num_layers": 2}
TENANTS = (b"", b"a", b"b")


@dataclass
class Target:
    """What a drafter is told of it."""

    vocab_size: int = 100
    hidden_size: int = 8
    num_layers: int = 2
    memory_bytes: int | None = None


def make(path: Path | None, target: Target | None = None, **options: Any) -> SuffixDrafter:
    return SuffixDrafter(cast(DraftContext, target or Target()), store_path=path, **options)


def make_seq(tokens: list[int], num_prompt: int, salt: bytes) -> Sequence:
    return Sequence("r", 0, list(tokens), num_prompt, SamplingParams(), 0, 99, salt=salt)


def answer(drafter: SuffixDrafter, output: list[int], salt: bytes = b"") -> None:
    driver, seq = Driver(drafter), make_seq([98, 99, *output], 2, salt)
    driver.begin(seq)
    driver.end(seq)


def proposed(drafter: SuffixDrafter, newest: list[int], salt: bytes = b"", most: int = 6) -> list[tuple[int, int]]:
    """The nodes of a draft behind a new sequence's tokens."""
    driver, seq = Driver(drafter), make_seq(newest, len(newest), salt)
    driver.begin(seq)
    (draft,) = driver.propose([seq], [most])
    drafter._texts.clear()  # not an answer
    drafter._prompts = type(drafter._prompts)()
    return list(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True))


def held(drafter: SuffixDrafter) -> dict[bytes, list[list[int]]]:
    return {name: [text.tokens.tolist() for text in t.texts] for name, t in drafter._store._tenants.items()}


ANSWERS = st.lists(st.tuples(st.sampled_from(TENANTS), st.lists(st.integers(0, 4), max_size=12)), max_size=12)


@settings(max_examples=60)
@given(
    answers=ANSWERS, probe=st.lists(st.integers(0, 4), min_size=2, max_size=5), num_tokens=st.sampled_from([80, 10**4])
)
def test_what_was_saved_is_proposed_again(
    tmp_path_factory: pytest.TempPathFactory,
    answers: list[tuple[bytes, list[int]]],
    probe: list[int],
    num_tokens: int,
) -> None:
    path = tmp_path_factory.mktemp("store") / "texts"
    mib = num_tokens * textstore._BYTES_PER_TOKEN / 2**20
    before = make(path, store_mib=mib)
    for salt, output in answers:
        answer(before, output, salt)
    before.close()
    assert path.exists() == bool(answers)
    after = make(path, store_mib=mib)
    assert list(held(after).items()) == list(held(before).items()), "the texts, and who was here last"
    assert after._store._num_tokens == before._store._num_tokens
    for salt in TENANTS:
        assert proposed(after, probe, salt) == proposed(before, probe, salt)


def test_tenants_never_see_each_other_before_or_after_a_reload(tmp_path: Path) -> None:
    """Tenant i writes tokens 10 i to 10 i + 9 alone; whoever wrote nothing gets nothing."""
    rng, path = random.Random(0), tmp_path / "texts"
    salts = [bytes([i]) * 32 for i in range(5)]
    for _ in range(3):
        drafter = make(path)
        for _ in range(10):
            for i, salt in enumerate(salts):
                answer(drafter, [10 * i + rng.randrange(10) for _ in range(12)], salt)
        drafter.close()
        for each in (drafter, make(path)):
            num_drafted = [0] * 6
            for i, salt in enumerate([*salts, b"new"]):
                for a, b in itertools.permutations(range(10), 2):
                    nodes = proposed(each, [10 * (i % 5) + a, 10 * (i % 5) + b], salt)
                    assert {token // 10 for token, _ in nodes} <= {i, 9}, "or of the prompt that all have"
                    num_drafted[i] += len(nodes)
            assert num_drafted[5] == 0
            assert min(num_drafted[:5]) > 100
    data = path.read_bytes()
    assert all(salt not in data for salt in salts), "who has the file has nobody's salt"


def test_two_stores_name_a_tenant_differently(tmp_path: Path) -> None:
    names = set()
    for name in ("one", "two"):
        drafter = make(tmp_path / name)
        answer(drafter, [1, 2, 3], b"tenant")
        drafter.close()
        names |= set(held(make(tmp_path / name)))
    assert len(names) == 2


def drafted(model: Path, path: Path, salt: bytes) -> SequenceStats:
    """What becomes of the drafts for a tenant's question, in an engine that opens and closes the file."""
    config = EngineConfig(
        model=str(model),
        dtype="float32",
        max_model_len=128,
        drafter="suffix",
        drafter_options={"store_path": str(path)},
        adaptive=False,
    )
    engine = build(config).engine
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.add(Request(id="r", prompt_ids=list(range(20, 40)), params=params, salt=salt))
    (seq,) = engine.requests["r"]
    while engine.has_work:
        engine.step()
    engine.policy.close()
    assert engine.policy.num_dropped == 0
    return seq.stats


def test_the_counts_of_a_tenant_do_not_tell_what_another_one_was_answered(tmp_path: Path) -> None:
    model, path = write_tiny_model(tmp_path / "model", "llama", seed=3), tmp_path / "texts"
    first = drafted(model, path, b"a")
    other = drafted(model, path, b"b")
    again = drafted(model, path, b"a")
    assert (other.num_draft_tokens, other.num_accepted_tokens, other.num_steps) == (
        first.num_draft_tokens, first.num_accepted_tokens, first.num_steps,
    )  # fmt: skip
    assert again.num_accepted_tokens > first.num_accepted_tokens + 5, "its own answer is known after two restarts"


def test_a_small_store_takes_the_newest_of_a_large_file(tmp_path: Path) -> None:
    large = make(tmp_path / "texts")
    for i in range(50):
        answer(large, [i] * 30, bytes([i]))
    large.close()
    for num_tokens in (100, 500, 1000):
        small = make(tmp_path / "texts", store_mib=num_tokens * textstore._BYTES_PER_TOKEN / 2**20)
        store = small._store
        assert sum(len(tenant) for tenant in store._tenants.values()) == store._num_tokens <= num_tokens
        kept = list(held(small).values())
        assert kept == list(held(large).values())[-len(kept) :], "the last ones"
        assert len(kept) == num_tokens // (33 + textstore._TENANT_TOKENS)
    assert held(make(tmp_path / "texts", store_mib=0)) == {}


def test_of_one_text_that_is_too_long_its_end_is_kept(tmp_path: Path) -> None:
    large = make(tmp_path / "texts")
    for _ in range(50):
        answer(large, [random.randrange(90) for _ in range(40)])
    large.close()
    small = make(tmp_path / "texts", store_mib=300 * textstore._BYTES_PER_TOKEN / 2**20)
    assert 100 < small._store._num_tokens <= 300
    ((newer, older),) = held(small).values()
    ((whole, _),) = held(large).values()
    assert whole[-len(older) - len(newer) :] == older + newer


def test_no_damage_is_a_crash_or_gives_a_tenant_what_is_not_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every byte of a file changed, and every beginning of it."""
    path, aside = tmp_path / "texts", tmp_path / "texts.damaged"
    drafter = make(path)
    answer(drafter, [1, 2, 3, 4, 5], b"a")
    answer(drafter, [1, 2, 6, 7, 8], b"b")
    drafter.close()
    whole = path.read_bytes()
    damaged = [whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in range(len(whole))]
    damaged += [whole[:i] for i in range(len(whole))] + [whole + b"\0", b"#!/bin/sh\n"]
    for data in damaged:
        path.write_bytes(data)
        caplog.clear()
        found = make(path)
        assert held(found) == {}
        assert not any(proposed(found, [1, 2], salt) for salt in TENANTS)
        assert "texts is not used, and becomes texts.damaged" in caplog.text
        assert aside.read_bytes() == data
        assert not path.exists()
    path.write_bytes(whole)
    assert len(held(make(path))) == 2


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_layers"])
def test_a_file_of_another_model_is_refused_and_stays(tmp_path: Path, name: str) -> None:
    drafter = make(tmp_path / "texts")
    answer(drafter, [1, 2, 3])
    drafter.close()
    before = (tmp_path / "texts").read_bytes()
    with pytest.raises(ConfigError, match=rf"texts for another model, with .*{name}.*instead of .*{name} 3"):
        make(tmp_path / "texts", Target(**{name: 3}))
    assert (tmp_path / "texts").read_bytes() == before


@pytest.mark.parametrize("path", ["", 5, True, "missing/texts", "."])
def test_a_path_that_cannot_be_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"store_path|cannot be written"):
        make(path)


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    partial = tmp_path / ".texts.partial"
    partial.touch(0o666)
    partial.chmod(0o666)  # left behind, by whomever
    (tmp_path / "texts").touch(0o666)
    drafter = make(tmp_path / "texts")
    answer(drafter, [1, 2, 3])
    drafter.close()
    assert stat.S_IMODE((tmp_path / "texts").stat().st_mode) == 0o600
    assert not partial.exists()


def test_a_server_that_is_killed_while_it_saves_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path, key = tmp_path / "texts", new_key()
    file = TextFile(path, TARGET)
    code = """if True:
        import os, sys
        from array import array
        from pathlib import Path
        from specserve.checkpoint.textfile import TextFile
        calls = []
        def pause():
            calls.append(1)
            if len(calls) == int(sys.argv[2]):
                os.kill(os.getpid(), 9)
        texts = [(bytes([i]) * 32, array("i", [i] * 40_000)) for i in range(5)]
        target = {"vocab_size": 100, "hidden_size": 8, "num_layers": 2}
        TextFile(Path(sys.argv[1]), target).save(bytes(32), texts, pause)
    """
    for at in (1, 7):
        file.save(key, [(b"x" * 32, array("i", [1, 2, at]))], lambda: None)
        done = subprocess.run([sys.executable, "-c", code, str(path), str(at)], check=False)
        assert done.returncode == -signal.SIGKILL
        assert (tmp_path / ".texts.partial").exists(), "it was in the midst of it"
        assert plain(file.load().texts) == [(b"x" * 32, [1, 2, at])]
    done = subprocess.run([sys.executable, "-c", code, str(path), "99"], check=True)
    assert [len(text) for _, text in file.load().texts] == [40_000] * 5
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".texts.lock", "texts"]


def plain(texts: list[tuple[bytes, Any]]) -> list[tuple[bytes, list[int]]]:
    return [(tenant, text.tolist()) for tenant, text in texts]


def test_of_two_that_write_at_once_one_wins_whole(tmp_path: Path) -> None:
    file, seen = TextFile(tmp_path / "texts", TARGET), []
    keys = [bytes([i]) * 32 for i in range(3)]

    def write(i: int) -> None:
        for _ in range(5):
            texts = [(bytes([i, n]) + bytes(30), array("i", [i] * 20_000)) for n in range(i + 2)]
            TextFile(file.path, TARGET).save(keys[i], texts, lambda: threading.Event().wait(1e-4))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = file.load()
        if found.texts:
            i = keys.index(found.key)
            assert plain(found.texts) == [(bytes([i, n]) + bytes(30), [i] * 20_000) for n in range(i + 2)]
            seen.append(i)
    for thread in threads:
        thread.join()
    assert seen
    assert file.load().key in keys


def test_a_text_that_grows_while_it_is_saved_is_there_up_to_a_point(tmp_path: Path) -> None:
    drafter = make(tmp_path / "texts")
    answer(drafter, list(range(90)) * 400, b"a")
    answer(drafter, list(range(90)) * 400, b"b")
    drafter._store.take(10**6)
    before, texts = held(drafter), drafter._store.texts_of_all()

    def grow() -> None:
        answer(drafter, list(range(50)) * 20, b"b")
        answer(drafter, list(range(50)) * 20, b"c")
        drafter._store.take(1000)  # ends in the midst of an answer

    TextFile(tmp_path / "texts", TARGET).save(drafter._store._key, texts, grow)
    found = make(tmp_path / "texts")
    assert list(held(found)) == list(before), "those that were there"
    for name, (newer, _) in held(found).items():
        assert newer[:-1] == held(drafter)[name][0][: len(newer) - 1]
        assert newer[-1] == textstore._END
        assert len(newer) >= len(before[name][0])


def test_the_store_is_saved_beside_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a thread that somebody else's steps do not wait for; a failure is told and tried again."""
    drafter = make(tmp_path / "texts")
    answer(drafter, [1, 2, 3, 4, 5])
    assert drafter._store._saver is None, "it is not time"
    drafter._store.take(100)
    monkeypatch.setattr(textstore, "_SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(textstore, "_PAUSE_S", 60.0)  # of the thread alone
    answer(drafter, [5, 6, 7])
    assert drafter._store._saver is not None
    drafter.close()
    assert not drafter._store._saver.is_alive()
    assert proposed(make(tmp_path / "texts"), [1, 2])[:3] == [(3, -1), (4, 0), (5, 1)]
    (tmp_path / "gone").mkdir()
    drafter = make(tmp_path / "gone" / "texts")
    (tmp_path / "gone").rmdir()
    (tmp_path / "gone").touch()
    answer(drafter, [1, 2, 3, 4, 5])
    assert drafter._store._saver is not None
    drafter._store._saver.join(60)
    assert "could not be written; the next try is in some minutes" in caplog.text
    (tmp_path / "gone").unlink()
    (tmp_path / "gone").mkdir()
    drafter.close()
    assert proposed(make(tmp_path / "gone" / "texts"), [1, 2])


@pytest.mark.parametrize(("granted", "mib"), [(None, 64.0), (4 * 2**20, 4.0), (2**30, 64.0)])
def test_a_drafter_that_comes_late_has_a_store_of_what_is_left(granted: int | None, mib: float) -> None:
    assert make(None, Target(memory_bytes=granted)).needs.memory_bytes == mib * 2**20
    assert make(None, Target(memory_bytes=granted), store_mib=8.0).needs.memory_bytes == 8 * 2**20


def test_tenants_who_say_little_are_counted_too() -> None:
    """A client that invents a salt for each request does not fill the memory."""
    drafter = make(None, store_mib=1.0)
    for i in range(5000):
        answer(drafter, [1], i.to_bytes(4, "little"))
        drafter._store.take(100)
    assert len(drafter._store._tenants) <= 2**20 // textstore._BYTES_PER_TOKEN // textstore._TENANT_TOKENS
