"""The rules of the house: who may import whom, how long functions and files are, what is never done. Every rule is also
run on a small tree that breaks it, and must say so."""

from __future__ import annotations

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLUG_INS = ("drafters", "kernels", "grammars")

# From the top down. A module may import those of lower rows and its own package; never a neighbour in its row.
LAYERS = (
    ("cli",),
    ("client", "train"),
    ("server", "bench", "doctor"),
    ("llm", "async_llm", "testing", "layout"),  # testing: the public doubles, made of models and contracts
    ("prompts",),
    ("outputs",),
    ("cluster",),
    ("engine",),
    ("speculation", "structured"),
    ("parallel",),
    ("runtime",),
    ("sampling",),
    ("models", "text"),
    ("checkpoint",),
    ("cache", "ops"),
    ("structured.walk", "structured.constrain"),  # a draft along a grammar's state, for whoever fits one to the other
    ("types", "sse"),
    ("explained",),
    ("structured.schema",),
    ("config", "structured.spec"),  # what a request asks for; the rest of structured/ enforces it
    ("structured.library", "adapters", "beams"),
    ("files", "histogram", "machine", "registry"),
    ("errors", "help", "terminal", "version"),
)
# What a file of drafters/, kernels/ and grammars/ may know of specserve: contracts, never who uses them.
CONTRACTS = (
    "types",
    "errors",
    "config",
    "structured",
    "ops",
    "machine.pulse",
    "sampling.noise",
    "speculation.base",
    "speculation.draft_sampler",
    "speculation.feature_drafter",
    "speculation.likeliest",
    "speculation.models",
    "speculation.retrieval",
    "checkpoint.textstore",
)
CORE = ("types", "explained", "adapters", "engine", "cache", "runtime", "sampling", "speculation", "drafters")
# Drafters that run models, adapters and beams, and what these alone use, are no part of it.
WITH_MODELS = (
    *("draft_model", "eagle", "mtp", "block", "medusa"),
    *("models", "context", "model_runner", "draft_sampler", "likeliest", "feature_drafter"),
    *("adapters", "adapter_loader", "adapter_loading", "adapter_heads", "beams"),
)
# 290 more since requests have adapters and beams, models processes and steps under way at once, and GPUs graphs.
CORE_LIMIT = 4_970
CONFIG_FIELDS_LIMIT = 32
FUNCTION_LIMITS = {"median": 10, "p90": 26, "max": 60}
FILE_LIMIT = 400
_OURS = "specserve"
IMPORTED_AS = {"dynamo": "ai-dynamo"}  # packages of distributions that have another name and may be absent
FORBIDDEN_NAMES = ("utils", "util", "helpers", "helper", "manager", "managers", "common", "misc")
FORBIDDEN_IMPORTS = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal")


@cache
def parsed(source: str) -> ast.Module:
    """Every rule looks at the same files."""
    return ast.parse(source)


@cache
def walked(source: str) -> list[ast.AST]:
    return list(ast.walk(parsed(source)))


@cache
def import_statements(source: str) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Wherever they stand, and whether they run at import."""
    deferred = {id(node) for block in _deferred(walked(source)) for node in ast.walk(block)}
    return [
        (node, id(node) not in deferred) for node in walked(source) if isinstance(node, ast.Import | ast.ImportFrom)
    ]


@dataclass(frozen=True)
class Import:
    """One imported module, and whether it is imported when the file is."""

    name: str
    line: int
    runs_at_import: bool


@dataclass(frozen=True)
class Module:
    """A source file under its import name; `folder` is the top-level folder it lies in."""

    name: str
    path: Path
    folder: str

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def part(self) -> str:
        """Its place in LAYERS: `engine` for specserve.engine.port; __main__ is the cli's."""
        return self.folder if self.folder in PLUG_INS else part_of(self.name)

    def where(self, line: int) -> str:
        return f"{self.name}:{line}"


def part_of(name: str) -> str:
    """The longest name in LAYERS that a module of specserve begins with, else its first one below the package."""
    parts = name.split(".")[1:]
    known = {part for row in LAYERS for part in row}
    if parts in ([], ["__main__"]):
        return "cli"
    return next((part for n in (2, 1) if (part := ".".join(parts[:n])) in known), parts[0])


def modules(root: Path) -> list[Module]:
    """All source files of the product, plug-ins under the names they are imported by."""
    found = []
    for folder in ("specserve", *PLUG_INS):
        prefix = ("specserve",) if folder == "specserve" else ("specserve", folder)
        for path in sorted((root / folder).rglob("*.py")):
            parts = [*prefix, *path.relative_to(root / folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, path, folder))
    return found


def imports(module: Module, known: set[str]) -> Iterator[Import]:
    """Every import statement of a file, wherever it stands; `from x import y` is x.y if that is a module."""
    for node, runs_at_import in import_statements(module.source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert node.level == 0, f"{module.where(node.lineno)}: relative import"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in full]
        for name in dict.fromkeys(names):
            yield Import(name, node.lineno, runs_at_import)


def _deferred(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Blocks that do not run at import: functions, and `if TYPE_CHECKING:`."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from node.body


def layer_violations(root: Path) -> list[str]:
    """Imports that go up, sideways, or to a plug-in by name; those for type checkers and in functions count as well.
    Not looked at: specserve/__init__.py, whose re-exports are loaded on first use."""
    found = modules(root)
    known = {module.name for module in found}
    return [
        f"{module.where(entry.line)} imports {entry.name}: {reason}"
        for module in found
        if module.name != "specserve"
        for entry in imports(module, known)
        if entry.name.split(".")[0] == "specserve" and (reason := _wrong(module, entry.name))
    ]


def _wrong(module: Module, target: str) -> str | None:
    parts = target.split(".")
    if len(parts) == 1:
        return None if module.part == "cli" else "the package itself is for users, import the module that defines it"
    if module.part in PLUG_INS:
        return _wrong_in_plug_in(module.part, ".".join(parts[1:]))
    if parts[1] in PLUG_INS:
        return "plug-ins are found by name, never imported" if len(parts) > 2 else None
    target_part = part_of(target)
    ranks = {part: rank for rank, row in enumerate(LAYERS) for part in row}
    for part in (module.part, target_part):
        if part not in ranks:
            return f"{part} is in no layer"
    if module.part == target_part or ranks[module.part] < ranks[target_part]:
        return None
    return f"{module.part} may not know {target_part}"


def _wrong_in_plug_in(folder: str, target: str) -> str | None:
    allowed = (*CONTRACTS, folder)
    if any(target == name or target.startswith(f"{name}.") for name in allowed):
        return None
    return f"a file of {folder}/ may only import contracts ({', '.join(CONTRACTS)})"


def cycles(root: Path) -> list[str]:
    """Modules that import each other while being imported, each cycle once."""
    found = modules(root)
    known = {module.name for module in found}
    graph = {
        module.name: {e.name for e in imports(module, known) if e.runs_at_import and e.name in known} - {module.name}
        for module in found
    }
    reached: dict[str, set[str]] = {}
    for name in graph:
        reached[name], open_ = set(), [name]
        while open_:
            fresh = graph[open_.pop()] - reached[name]
            reached[name] |= fresh
            open_ += fresh
    return [f"{a} and {b} import each other" for a in graph for b in reached[a] if a < b and a in reached[b]]


def function_lengths(root: Path) -> dict[str, int]:
    """Lines from `def` to the end, docstring included."""
    return {
        f"{module.where(node.lineno)} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module in modules(root)
        for node in walked(module.source)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def shape_violations(root: Path) -> list[str]:
    lengths = function_lengths(root)
    ordered = sorted(lengths.values())
    measured = {
        "median": statistics.median(ordered),
        "p90": ordered[max(0, -(-9 * len(ordered) // 10) - 1)],
    }
    found = [
        f"{k} function has {v} lines, limit {FUNCTION_LIMITS[k]}" for k, v in measured.items() if v > FUNCTION_LIMITS[k]
    ]
    found += [
        f"{name} has {n} lines, limit {FUNCTION_LIMITS['max']}"
        for name, n in lengths.items()
        if n > FUNCTION_LIMITS["max"]
    ]
    for module in modules(root):
        size = len(module.source.splitlines())
        if size > FILE_LIMIT:
            found.append(f"{module.name} has {size} lines, limit {FILE_LIMIT}")
    return found


def token_lines(source: str) -> int:
    """Lines that bear a token: no blank lines, comments or docstrings."""
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    docstrings = {
        line
        for node in walked(source)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def core_size(root: Path) -> int:
    return sum(token_lines(m.source) for m in modules(root) if m.part in CORE and m.path.stem not in WITH_MODELS)


def config_fields(root: Path) -> int:
    tree = ast.parse((root / "specserve/config.py").read_text(encoding="utf-8"))
    config = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "EngineConfig")
    return sum(isinstance(node, ast.AnnAssign) for node in config.body)


def habit_violations(root: Path) -> list[str]:
    """Things that are never done, file by file."""
    found = [
        f"{folder}/__init__.py exists" for folder in (*PLUG_INS, "tests") if (root / folder / "__init__.py").exists()
    ]
    found += [
        f"tests holds {p.relative_to(root)}"
        for p in (root / "tests").rglob("__init__.py")
        if p.parent != root / "tests"
    ]
    for module in modules(root):
        if module.path.stem in FORBIDDEN_NAMES:
            found.append(f"{module.name} is named for nothing in particular")
        if not (ast.get_docstring(parsed(module.source)) or not parsed(module.source).body):
            found.append(f"{module.name} does not open with what it knows")
        found += [
            f"{module.where(e.line)} imports {e.name}"
            for e in imports(module, set())
            if e.name.split(".")[0] in FORBIDDEN_IMPORTS
        ]
        found += [module.where(line) + what for node in walked(module.source) for line, what in _bad_statement(node)]
    return found


def _bad_statement(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Global):
        yield node.lineno, " has a global statement"
    if isinstance(node, ast.ExceptHandler) and node.type is None:
        yield node.lineno, " has a bare except"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "torch.load":
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if arguments.get("weights_only") != "True":
            yield node.lineno, " calls torch.load without weights_only=True"


def undeclared(root: Path) -> list[str]:
    """Third-party packages that are imported, which pyproject.toml does not require. What is imported only when it is
    asked for, in a function, by a plug-in or by the tests, may be of an extra. Not looked at: tests/contract, whose
    packages are installed for it."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = _distributions(project["dependencies"])
    extras = _distributions(one for some in project.get("optional-dependencies", {}).values() for one in some)
    paths = (path for path in sorted((root / "tests").rglob("*.py")) if "contract" not in path.parts)
    tests = [Module(".".join(path.relative_to(root).with_suffix("").parts), path, "tests") for path in paths]
    return [
        f"{module.where(entry.line)} imports {entry.name}"
        for module in [*modules(root), *tests]
        for entry in imports(module, set())
        if not _distributions_of(entry.name.split(".")[0])
        & (required if module.folder == "specserve" and entry.runs_at_import else required | extras)
    ]


def _distributions(requirements: Iterable[str]) -> set[str]:
    names = (re.split(r"[^\w.-]", requirement)[0] for requirement in requirements)
    return {_OURS, *(re.sub("[-_.]+", "-", name).lower() for name in names)}


@cache
def _distributions_of(package: str) -> set[str]:
    """Who brings a package; for the standard library and our own folders that is us."""
    if package in (_OURS, "tests", *sys.stdlib_module_names):
        return {_OURS}
    return _distributions(_installed().get(package, [IMPORTED_AS.get(package, package)])) - {_OURS}


@cache
def _installed() -> Mapping[str, list[str]]:
    """The distributions that bring each package; all metadata are read for it, which takes a tenth of a second."""
    return metadata.packages_distributions()


def loaded_by(names: Iterable[str], heavy: Iterable[str], path: Path) -> list[str]:
    """Which of the packages `heavy` a fresh Python has loaded after importing the modules `names`."""
    code = f"import sys, {', '.join(names)}; print(*(set({sorted(heavy)!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=path, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_layers() -> None:
    assert layer_violations(ROOT) == []


def test_every_part_has_a_layer() -> None:
    known = {part for row in LAYERS for part in row} | set(PLUG_INS)
    assert {module.part for module in modules(ROOT)} <= known


def test_no_cycles() -> None:
    assert cycles(ROOT) == []


def test_shape() -> None:
    assert shape_violations(ROOT) == []


def test_core_can_be_read_in_one_sitting() -> None:
    assert core_size(ROOT) <= CORE_LIMIT


def test_config_is_small() -> None:
    assert config_fields(ROOT) <= CONFIG_FIELDS_LIMIT


def test_habits() -> None:
    assert habit_violations(ROOT) == []


def test_dependencies_are_declared() -> None:
    assert undeclared(ROOT) == []


def test_cli_and_server_start_without_torch() -> None:
    runs_the_engine = ("specserve.__main__", "specserve.server.engine.process")
    light = [
        m.name
        for m in modules(ROOT)
        if m.part in ("cli", "client", "server", "cluster") and m.name not in runs_the_engine
    ]
    assert "specserve.cli.main" in light
    assert loaded_by(light, ["torch", "transformers"], ROOT) == []


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert targets is not None
    assert {f"make {name}" for name in targets[1].split()} <= set(re.findall(r"make [\w-]+", listed))


Plant = Callable[[str, str], Path]


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Adds a file to an otherwise lawful tree and returns its root."""
    for folder in ("specserve/engine", *PLUG_INS, "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "specserve/__init__.py").write_text('"""Root."""\n')
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["torch>=2", "huggingface-hub"]\n')
    (tmp_path / "specserve/errors.py").write_text('"""Errors."""\n\n\ndef short() -> int:\n    return 1\n')

    def add(path: str, text: str) -> Path:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text if text.startswith('"""') else f'"""Planted."""\n{text}')
        return tmp_path

    return add


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("specserve/cache/pool.py", "import specserve.engine.port\n"),  # up
        ("specserve/bench/run.py", "from specserve.server import app\n"),  # sideways
        ("specserve/cache/pool.py", "from specserve.ops import Ops\n"),  # sideways, one row
        ("specserve/types.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import specserve.llm\n"),
        ("specserve/engine/step.py", "def f():\n    from specserve.cli.main import main\n"),  # in a function
        ("specserve/engine/step.py", "import specserve.drafters.ngram\n"),  # a plug-in by name
        ("specserve/engine/step.py", "from specserve import LLM\n"),
        ("specserve/novelty.py", "import specserve.errors\n"),  # in no layer
        ("specserve/errors.py", "import specserve.config\n"),
        ("specserve/models/llama.py", "import specserve.cli.options\n"),
        ("drafters/mine.py", "from specserve.engine import loop\n"),
        ("kernels/mine.py", "from specserve.runtime.runner import Runner\n"),
        ("grammars/mine.py", "from specserve.drafters import ngram\n"),
    ],
)
def test_layers_notices(plant: Plant, path: str, text: str) -> None:
    assert len(layer_violations(plant(path, text))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "specserve/engine/step.py",
            "import specserve.errors\nimport specserve.cache.pool\nimport specserve.engine.port\n",
        ),
        ("specserve/speculation/base.py", "import specserve.drafters\n"),  # the folder, not a drafter
        ("specserve/cli/options.py", "import specserve\nimport specserve.llm\nimport specserve.cli.main\n"),
        ("drafters/mine.py", "from specserve.types import Draft\nfrom specserve.sampling.noise import uniform\n"),
        ("kernels/cuda/mine.py", "from specserve.kernels.reference import Kernels\nimport torch\n"),
    ],
)
def test_layers_allows(plant: Plant, path: str, text: str) -> None:
    assert layer_violations(plant(path, text)) == []


def test_cycles_notices(plant: Plant) -> None:
    plant("specserve/engine/a.py", "import specserve.engine.b\n")
    plant("specserve/engine/b.py", "from specserve.engine import c\n")
    assert cycles(plant("specserve/engine/c.py", "x = 1\n")) == []
    assert (
        len(cycles(plant("specserve/engine/c.py", "from specserve.engine.a import x\n"))) == 3
    )  # every pair of the three
    assert cycles(plant("specserve/engine/c.py", "def f():\n    import specserve.engine.a\n")) == []


def _function(lines: int, name: str = "f") -> str:
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1) + "\n\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("".join(_function(11, f"f{i}") for i in range(3)), "median"),
        ("".join(_function(27 if i < 2 else 2, f"f{i}") for i in range(9)), "p90"),
        (_function(61) + "".join(_function(2, f"f{i}") for i in range(20)), "limit 60"),
        ("x = 1\n" * 400, "limit 400"),
    ],
)
def test_shape_notices(plant: Plant, text: str, complaint: str) -> None:
    root = plant("specserve/engine/long.py", text)
    assert [complaint in violation for violation in shape_violations(root)] == [True]


def test_shape_allows_the_limits_themselves(plant: Plant) -> None:
    text = "".join(_function(n, f"f{i}") for i, n in enumerate([60, 26, *([10] * 18)]))
    assert shape_violations(plant("specserve/engine/long.py", text)) == []


def test_token_lines_count_code_alone() -> None:
    values = "x = [  # why\n    1,\n\n    # comment\n]\n"
    function = 'def f():\n    """Doc."""\n    return """a\nb"""\n'
    assert token_lines(f'"""Doc\nstring."""\n\n{values}\n\n{function}') == 3 + 3


def test_core_counts_drafters_and_engine_alone(plant: Plant) -> None:
    plant("specserve/engine/a.py", "x = 1\n")
    plant("specserve/bench/b.py", "x = 1\n")
    assert core_size(plant("drafters/c.py", "x = 1\ny = 2\n")) == 3


def test_config_fields_are_counted(plant: Plant) -> None:
    assert (
        config_fields(plant("specserve/config.py", "class EngineConfig:\n    a: int = 1\n    b: int = 2\n    c = 3\n"))
        == 2
    )


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("drafters/__init__.py", ""),
        ("tests/__init__.py", ""),
        ("tests/deep/__init__.py", ""),
        ("specserve/engine/utils.py", ""),
        ("specserve/engine/a.py", "def f():\n    import pickle\n"),
        ("specserve/engine/a.py", "from dill import loads\n"),
        ("specserve/engine/a.py", "def f():\n    global x\n    x = 1\n"),
        ("specserve/engine/a.py", "try:\n    x = 1\nexcept:\n    x = 2\n"),
        ("drafters/a.py", "import torch\nx = torch.load('f')\n"),
        ("drafters/a.py", "import torch\nx = torch.load('f', weights_only=False)\n"),
    ],
)
def test_habits_notices(plant: Plant, path: str, text: str) -> None:
    assert len(habit_violations(plant(path, text))) == 1


def test_habits_notices_a_file_that_does_not_say_what_it_knows(plant: Plant) -> None:
    root = plant("specserve/engine/a.py", "")
    (root / "specserve/engine/a.py").write_text("x = 1\n")
    assert len(habit_violations(root)) == 1


def test_habits_allows_safe_loading(plant: Plant) -> None:
    assert habit_violations(plant("drafters/a.py", "import torch\nx = torch.load('f', weights_only=True)\n")) == []


def test_undeclared_allows_what_is_required(plant: Plant) -> None:
    assert undeclared(plant("specserve/engine/a.py", "import torch.nn\nimport huggingface_hub\nimport json\n")) == []


@pytest.mark.parametrize(
    ("path", "text", "may_be_extra"),
    [
        ("specserve/engine/a.py", "import requests\n", False),
        ("specserve/engine/a.py", "def f():\n    import requests\n", True),
        ("grammars/a.py", "import requests\n", True),
        ("tests/test_a.py", "import requests\n", True),
    ],
)
def test_undeclared_notices(plant: Plant, path: str, text: str, may_be_extra: bool) -> None:
    root = plant(path, text)
    assert len(undeclared(root)) == 1
    with (root / "pyproject.toml").open("a") as project:
        project.write('optional-dependencies = {more = ["requests>=2"]}\n')
    assert (undeclared(root) == []) == may_be_extra


def test_loaded_by_notices(plant: Plant) -> None:
    plant("heavy.py", "")
    root = plant("light.py", "import heavy\n")
    assert loaded_by(["light"], ["heavy", "torch"], root) == ["heavy"]
    assert loaded_by(["json"], ["heavy", "torch"], root) == []
