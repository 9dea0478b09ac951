"""The playground's modules that touch no page, run by node: how streams are read, requests made, figures told and
conversations kept and exported. They run where there is no browser."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import specserve.server.pages
from tests.server.playground.replies import ANSWER, STEPS, WHOLE, calling_bytes, explained_bytes, stream_bytes

NODE = shutil.which("node")
MIN_NODE = 20  # the first with findLast and import of data in modules without flags
STATIC = Path(specserve.server.pages.__file__).with_name("static")
STRIDE = 23  # bytes between two cuts


def _node_version() -> int:
    if NODE is None:
        return 0
    said = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True, timeout=60)
    return int(said.stdout.removeprefix("v").split(".")[0])


pytestmark = pytest.mark.skipif(_node_version() < MIN_NODE, reason=f"there is no node, or none from {MIN_NODE} on")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules, where node takes them for such."""
    made = tmp_path_factory.mktemp("modules")
    shutil.copytree(STATIC / "playground", made / "playground")
    (made / "package.json").write_text('{"type": "module"}')
    return made


def run(folder: Path, code: str, given: Any = None) -> Any:
    """What `code` returns; it has all modules by name and `given`."""
    names = ("server", "figures", "request", "conversation", "store", "drafts")
    imports = "".join(f"import * as {name} from './playground/{name}.js';\n" for name in names)
    program = f"{imports}const given = {json.dumps(given)};\nconst told = await (async () => {{ {code} }})();\n"
    (folder / "run.js").write_text(program + "console.log(JSON.stringify(told ?? null));\n")
    assert NODE is not None
    ran = subprocess.run([NODE, "run.js"], cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


READ = """
const streams = [];
for (const pieces of given) {
  const stream = new ReadableStream({ async start(controller) {
    for (const piece of pieces) {
      controller.enqueue(new Uint8Array(Buffer.from(piece, "base64")));
      await new Promise(setImmediate);
    }
    controller.close();
  } });
  globalThis.fetch = async () => new Response(stream);
  const answer = server.emptyAnswer();
  const shown = [];
  const from = new server.Server(new URL("http://127.0.0.1:1/"), () => {});
  for await (const event of from.chat({}, null)) shown.push(...server.take(answer, event));
  streams.push({ answer, shown: shown.filter(({ text }) => text).map(({ text, tokens }) => [text, tokens]) });
}
return streams;
"""


def read(folder: Path, streams: list[list[bytes]]) -> list[Any]:
    told = run(folder, READ, [[base64.b64encode(piece).decode() for piece in pieces] for pieces in streams])
    assert isinstance(told, list)
    return told


def test_an_answer_may_come_in_any_pieces(folder: Path) -> None:
    """Cut at every byte by one answer or another: between events, in the middle of them, and inside characters."""
    bounds = [[0, *range(first, len(WHOLE), STRIDE), len(WHOLE)] for first in range(1, STRIDE + 1)]
    assert {i for bound in bounds for i in bound} == set(range(len(WHOLE) + 1))
    cut = [[WHOLE[i:j] for i, j in itertools.pairwise(bound)] for bound in bounds]
    single = [WHOLE[i : i + 1] for i in range(len(WHOLE))]
    crlf = [WHOLE.replace(b"\n\n", b"\r\n\r\n")]
    pinged = [WHOLE.replace(b"\n\ndata:", b"\n\n: ping\n\ndata:")]
    wanted = [[text, tokens] for text, tokens in STEPS if text]
    for told in read(folder, [*cut, single, crlf, pinged]):
        assert told["shown"] == wanted
        assert (told["answer"]["text"], told["answer"]["tokens"]) == (ANSWER, 13)
        assert told["answer"]["reason"] == "length"
        assert told["answer"]["metrics"]["tokens_per_second"] == pytest.approx(40)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("rest = lines.pop();", 'rest = ""; lines.pop();'),
        ("(rest + value)", "value"),
        ("answer.text += piece.text;", ""),
        (".trim();", ";"),
    ],
)
def test_faults_in_the_reader_are_noticed(folder: Path, tmp_path: Path, right: str, wrong: str) -> None:
    shutil.copytree(folder, tmp_path / "m")
    module = tmp_path / "m/playground/server.js"
    source = module.read_text("utf-8")
    assert source.count(right) == 1
    module.write_text(source.replace(right, wrong))
    single = [WHOLE[i : i + 1] for i in range(len(WHOLE))]
    with pytest.raises(AssertionError):
        (told,) = read(tmp_path / "m", [single])
        assert told["answer"]["text"] == ANSWER
        (told,) = read(tmp_path / "m", [[WHOLE.replace(b"\n\n", b" \r\n\r\n").replace(b"[DONE]", b"[DONE] ")]])


def test_reasoning_and_calls_are_put_together(folder: Path) -> None:
    thought = stream_bytes(thought="Hm")
    calls = calling_bytes(("f", '{"a": 1}'), ("g", "{}"), text="so")
    one, two = read(folder, [[thought], [calls]])
    assert (one["answer"]["thought"], one["answer"]["text"]) == ("Hm", ANSWER)
    functions = [call["function"] for call in two["answer"]["calls"]]
    assert functions == [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}]
    assert [call["id"] for call in two["answer"]["calls"]] == ["call-0", "call-1"]


def test_drafts_are_counted_by_source(folder: Path) -> None:
    (told,) = read(folder, [[explained_bytes()]])
    events = [json.loads(line[6:]) for line in explained_bytes().splitlines() if line.startswith(b"data: {")]
    steps = [choice["explained"] for event in events for choice in event["choices"] if "explained" in choice]
    counts = run(
        folder, "const counts = {}; for (const step of given) drafts.count(counts, step); return counts;", steps
    )
    assert told["answer"]["text"] == "<b> sky is!\ufffd"
    assert counts == {
        "suffix": {"num_draft_tokens": 4, "num_accepted_tokens": 1},
        "ngram": {"num_draft_tokens": 2, "num_accepted_tokens": 1},
        "jump_forward": {"num_draft_tokens": 0, "num_accepted_tokens": 1},
    }


def test_what_sources_did_between_two_readings(folder: Path) -> None:
    def counts(drafted: int, accepted: int) -> Any:
        return {"num_draft_tokens": drafted, "num_accepted_tokens": accepted}

    readings = [{"a": counts(5, 2)}, {"a": counts(9, 3), "b": counts(1, 1)}, {"a": counts(1, 1)}]
    code = "return [figures.between(given[0], given[1]), figures.between(given[1], given[2])];"
    assert run(folder, code, readings) == [{"a": counts(4, 1), "b": counts(1, 1)}, {"a": counts(0, 0)}]


@pytest.mark.parametrize(
    ("one", "other", "place"), [("abc", "abd", 3), ("🐢a", "🐢b", 2), ("ab", "abc", 3), ("", "a", 1)]
)
def test_the_first_difference(folder: Path, one: str, other: str, place: int) -> None:
    assert run(folder, "return figures.difference(...given);", [one, other]) == place


def test_titles(folder: Path) -> None:
    turns = [[{"role": "user", "content": text}] for text in ("  a\n b ", "x" * 60, "")]
    assert run(folder, "return given.map(conversation.titleOf);", turns) == ["a b", "x" * 47 + "…", ""]


def test_a_fence_in_an_export_is_longer_than_those_inside(folder: Path) -> None:
    turns = [{"role": "tool", "tool_call_id": "1", "content": "````\nx\n````"}]
    text = run(folder, "return conversation.toMarkdown({ title: 'a', updated: 'b', turns: given });", turns)
    assert text.endswith("## Result of a tool\n\n`````\n````\nx\n````\n`````\n")


def test_calls_without_results_are_open(folder: Path) -> None:
    call = [{"id": name, "function": {"name": "f", "arguments": ""}} for name in ("a", "b")]
    turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": "", "tool_calls": call}]
    told = [*turns, {"role": "tool", "tool_call_id": "a", "content": ""}]
    code = "return given.map((turns) => conversation.openCalls(turns).map(({ id }) => id));"
    assert run(folder, code, [turns, told, turns[:1], []]) == [["a", "b"], ["b"], [], []]


def test_a_browser_that_keeps_nothing_says_so(folder: Path) -> None:
    code = """
    const kept = new store.Store(null, "/");
    try { kept.save({ id: "a", turns: [] }); } catch (error) { return [kept.all(), error.message]; }
    """
    assert run(folder, code) == [[], "The browser lets this page keep nothing."]


def test_pages_of_other_paths_keep_their_own(folder: Path) -> None:
    code = """
    const entries = new Map();
    const storage = { get length() { return entries.size; }, key: (n) => [...entries.keys()][n],
      getItem: (name) => entries.get(name) ?? null, setItem: (name, text) => entries.set(name, text),
      removeItem: (name) => entries.delete(name) };
    const [here, there] = ["/", "/llm/"].map((path) => new store.Store(storage, path));
    here.save({ id: "a", updated: "1", turns: [] });
    here.save({ id: "b", updated: "2", turns: [] });
    there.save({ id: "c", updated: "3", turns: [] });
    const before = [here, there].map((each) => each.all().map(({ id }) => id));
    here.remove("b");
    return [...before, here.all().length];
    """
    assert run(folder, code) == [["b", "a"], ["c"], 1]
