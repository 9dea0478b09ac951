"""A new drafter, kernel backend, grammar backend or model family is one new file, or an entry point of another package:
dropped in, it is found by everybody and used end to end. And what the registry says of those that do not fit."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specserve.cli.main import run
from specserve.doctor import examine
from specserve.errors import ConfigError, InputError, ModelError
from specserve.llm import LLM, CompletionOutput
from specserve.registry import DRAFTERS, GRAMMARS, KERNELS, MODELS, Registry
from specserve.runtime.executor import local
from specserve.structured.compiler import Compiler
from specserve.structured.spec import Structured
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams

PROMPT = [5, 6, 7, 8] * 6
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

DRAFTER = """
from specserve.drafters.ngram import NgramDrafter

class DroppedDrafter(NgramDrafter):
    pass
"""
KERNEL = """
from specserve.kernels.reference import Kernels

PRIORITY = 99

class DroppedKernels(Kernels):
    name = "dropped"

    @classmethod
    def supports(cls, asked):
        return None if asked.threads == 3 else "counts to three: use --threads 3."
"""
GRAMMAR = """
from specserve.structured.base import RefusedError
from specserve.testing import LanguageGrammar

PRIORITY = 99

class DroppedBackend:
    kinds = frozenset({"regex"})

    def __init__(self, vocabulary):
        self.end = vocabulary.eos_ids[0]

    def compile(self, asked):
        if asked.text != "dropped":
            raise RefusedError("it knows one word.")
        return LanguageGrammar([[9, 8, 7, self.end]])
"""
FAMILY = """
from specserve.models.config import read_spec

ARCHITECTURES = ("DroppedForCausalLM",)
MODEL_TYPES = ("dropped",)

def spec(config):
    return read_spec(config)

def rename(name):
    return name.removeprefix("dropped.")
"""

Drop = Callable[[Registry, str, str], None]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(params=["file", "entry point"])
def drop(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drop]:
    """Puts the text of a new entry where a file lies, or where pip would install another package; nothing else."""
    before = set(sys.modules)

    def put(registry: Registry, name: str, text: str) -> None:
        package = importlib.import_module(registry.package)
        if request.param == "file":
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
            return
        (tmp_path / f"another_{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        classes = [line.split()[1].partition("(")[0].rstrip(":") for line in text.splitlines() if line[:5] == "class"]
        (info := tmp_path / f"another_{name}-1.0.dist-info").mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: another-{name}\nVersion: 1.0\n")
        place = ":".join([f"another_{name}", *classes[-1:]])
        (info / "entry_points.txt").write_text(f"[{registry.package}]\n{name} = {place}\n")

    yield put
    for name in set(sys.modules) - before:
        if name.rpartition(".")[2].removeprefix("another_") in ("dropped", "other", "wrong"):
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if parent:
                vars(sys.modules[parent]).pop(child, None)


def small(folder: Path, **options: object) -> LLM:
    sizes = {"threads": 1, "kv_cache_gib": 0.01, "max_model_len": 160}
    return LLM(str(folder), **{"dtype": "float32", "drafter": "none", "adaptive": False, **sizes, **options})


def answer(llm: LLM, params: SamplingParams = GREEDY, drafter: str | None = None) -> CompletionOutput:
    return llm.generate([PROMPT], params, drafter=drafter)[0].outputs[0]


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[int]:
    return answer(llm, params).token_ids


def test_a_drafter_drafts(drop: Drop, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="Unknown drafter 'dropped'"):
        small(tiny, drafter="dropped")
    drop(DRAFTERS, "dropped", DRAFTER)
    with small(tiny) as llm:
        plain = answer(llm)
    with small(tiny, drafter="dropped", drafter_options={"prompt_lookup_min": 1}) as llm:
        drafted = answer(llm)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_draft_tokens > 0 == plain.stats.num_draft_tokens
    with pytest.raises(ConfigError, match=r"'prompt_lookup_mni'. Did you mean 'prompt_lookup_min'"):
        small(tiny, drafter="dropped", drafter_options={"prompt_lookup_mni": 1})
    assert run(["doctor", str(tiny)]) == 0
    assert re.search(r"\bdropped\b", capsys.readouterr().out)


def test_a_request_may_name_a_drafter_that_is_a_file(drop: Drop, tiny: Path, request: pytest.FixtureRequest) -> None:
    """One of another package is only the engine's own: a request does not decide whose code runs."""
    drop(DRAFTERS, "dropped", DRAFTER)
    with small(tiny) as llm:
        if request.node.callspec.params["drop"] == "file":
            drafted = answer(llm, drafter="dropped")
            assert drafted.token_ids == answer(llm).token_ids
            assert drafted.stats.num_draft_tokens > 0
        else:
            with pytest.raises(InputError, match="must be the engine's --drafter"):
                answer(llm, drafter="dropped")


def test_kernels_serve_what_they_support(drop: Drop, tiny: Path, without_native: None) -> None:
    with small(tiny, threads=3) as llm:
        plain = tokens(llm)
    drop(KERNELS, "dropped", KERNEL)
    with small(tiny, threads=3) as llm:
        assert local(llm.engine.executor).runner.ops.name == "dropped"
        assert "(dropped kernels" in llm.summary
        assert tokens(llm) == plain
    with small(tiny, threads=2) as llm:
        assert local(llm.engine.executor).runner.ops.name == "reference"
    with pytest.raises(
        ConfigError, match=r"--quantization int4\. dropped counts to three: use --threads 3\. cpu needs"
    ):
        small(tiny, dtype="auto", quantization="int4")
    (kernels,) = [dict(section.rows)["chosen"] for section in examine(str(tiny)) if section.title == "Kernels"]
    assert "cpu, dropped, reference" in kernels


@pytest.mark.parametrize("backend", ["auto", "dropped"])
def test_a_grammar_backend_enforces_what_it_takes(drop: Drop, tiny: Path, backend: str) -> None:
    drop(GRAMMARS, "dropped", GRAMMAR)
    with small(tiny, grammar_backend=backend) as llm:
        for length in (2, 9):
            asked = SamplingParams(temperature=0, max_tokens=length, structured=Structured.regex("dropped"))
            assert tokens(llm, asked)[:3] == [9, 8, 7][:length]
        other = SamplingParams(temperature=0, max_tokens=9, structured=Structured.regex("ab"))
        if backend == "auto":  # the next one takes it
            assert answer(llm, other).text == "ab"
        else:
            with pytest.raises(InputError, match="it knows one word"):
                answer(llm, other)


def test_a_grammar_backend_without_priority_is_used_by_name_only(drop: Drop) -> None:
    drop(GRAMMARS, "dropped", GRAMMAR.replace("PRIORITY = 99", ""))
    assert "dropped" in GRAMMARS.names()
    assert "dropped" not in GRAMMARS.ranked()
    assert "another_dropped" not in sys.modules and "specserve.grammars.dropped" not in sys.modules
    Compiler(lambda: None, "dropped")  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    "named",
    [
        {"architectures": ["DroppedForCausalLM"], "model_type": "unheard_of"},
        {"architectures": ["DroppedForCausalLM"], "model_type": "llama"},  # the architecture says more
        {"architectures": None, "model_type": "dropped"},
    ],
)
def test_a_model_family_loads_and_generates(
    drop: Drop, tiny: Path, tmp_path: Path, named: dict[str, list[str] | str | None]
) -> None:
    """The weights of a llama under names of its own, in a checkpoint of an invented architecture."""
    with small(tiny) as llm:
        plain = tokens(llm)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((tiny / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | named))
    tensors = {f"dropped.{name}": tensor for name, tensor in load_file(tiny / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"no native implementation.*Known: .*llama|lacks model\.embed_tokens"):
        small(folder)
    drop(MODELS, "dropped", FAMILY)
    with small(folder) as llm:
        assert tokens(llm) == plain


# What does not fit


@pytest.mark.parametrize(
    ("registry", "text", "message"),
    [
        (
            KERNELS,
            "class AKernels:\n    def create(self): pass\n",
            "has no supports; a kernel backend has supports, create",
        ),
        (GRAMMARS, "class ABackend: pass\n", "has no kinds, compile"),
        (MODELS, "ARCHITECTURES = ('A',)\n", "has no spec; a model family has spec"),
        (DRAFTERS, "class ADrafter: pass\n", "has no begin, propose, observe, end"),
        (
            KERNELS,
            "import a_package_that_is_not_there\n",
            "needs the package 'a_package_that_is_not_there', which is not",
        ),
    ],
)
def test_an_entry_that_breaks_its_contract_says_how(drop: Drop, registry: Registry, text: str, message: str) -> None:
    drop(registry, "wrong", text)
    with pytest.raises(ConfigError, match=rf"{registry.noun.capitalize()} 'wrong'.* {message}"):
        registry.find("wrong")


def test_what_is_stated_is_a_literal(drop: Drop) -> None:
    drop(KERNELS, "wrong", '"""Doc."""\nPRIORITY = 5 + int("5")\nclass WrongKernels: pass\n')
    with pytest.raises(ConfigError, match=r"wrong: PRIORITY is 5 \+ int\('5'\); .* must be a literal"):
        KERNELS.ranked()


def test_the_first_that_supports_it_is_chosen_and_no_other_is_imported(drop: Drop, without_native: None) -> None:
    """Of equals the order is that of names; one whose package is missing is passed over."""
    text = '"""Doc."""\nPRIORITY = {}\n{}\nclass AKernels:\n    create = None\n    supports = lambda asked: None\n'
    drop(KERNELS, "dropped", text.format(50, "import a_package_of_nobody"))
    drop(KERNELS, "other", text.format(50, ""))
    drop(KERNELS, "wrong", text.format(40, "raise RuntimeError('imported')"))
    assert KERNELS.ranked() == ["dropped", "other", "wrong", "cpu", "triton", "reference"]
    assert KERNELS.choose("anything") is KERNELS.find("other")


def test_a_mistake_of_our_own_is_no_missing_package(drop: Drop) -> None:
    drop(KERNELS, "wrong", "import specserve.kernels._not_there\n")
    with pytest.raises(ModuleNotFoundError, match="_not_there"):
        KERNELS.find("wrong")


def test_parts_and_folders_are_no_entries() -> None:
    for registry in (DRAFTERS, KERNELS, GRAMMARS, MODELS):
        assert not [name for name in registry.names() if name.startswith("_")]
    assert "library" not in GRAMMARS.names()
    families = set(MODELS.names())
    assert families == set(MODELS.stating("MODEL_TYPES"))
    assert {"llama", "gpt2", "mixtral"} <= families
    assert not families & {"layers", "spec", "heads", "names"}
    with pytest.raises(ConfigError, match="Unknown kernel backend '_native'"):
        KERNELS.find("_native")


def test_names_are_checked_and_others_are_known() -> None:
    for name in ("auto", "none", "ngram"):
        DRAFTERS.check(name)
    with pytest.raises(ConfigError, match=r"Unknown drafter 'aut'\. Did you mean 'auto'\? Known: auto, .*"):
        DRAFTERS.check("aut")
