"""`specserve chat` as it is used: in a terminal, with pastes, Ctrl-C and commands; against a server; from a pipe."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from specserve.cli.conversation import markdown as cli_markdown, saved, settings
from specserve.cli.main import run
from specserve.errors import InputError
from specserve.testing import write_tiny_model

WAIT_S = 120.0  # for what comes at once on a machine that does nothing else
PROMPT, MORE = "> ", ". "
PASTE, PASTED = "\x1b[200~", "\x1b[201~"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
DRAFTED = {"mean_acceptance_length": 2.5, "num_draft_tokens": 10, "num_accepted_draft_tokens": 6}


class Terminal:
    """A command in a pseudo-terminal of `columns`, with what it has shown since the last `expect`."""

    def __init__(self, folder: Path, *arguments: str, columns: int = 100, **environment: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            kept = {
                name: value
                for name, value in os.environ.items()
                if name not in ("COLUMNS", "LINES", "SPECSERVE_API_KEY")
            }
            command = [sys.executable, "-m", "specserve", *arguments]
            # Not execv: readline, if it was loaded here, has set variables that os.environ does not know.
            os.execve(sys.executable, command, kept | {"TERM": "xterm-256color"} | environment)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.shown, self.raw = "", ""

    def press(self, keys: str) -> None:
        """Press keys now."""
        os.write(self.fd, keys.encode())

    def type(self, text: str, prompt: str = PROMPT) -> None:
        """Press keys once the line after the next prompt is read: before, the terminal itself would act on them."""
        self.expect(prompt, at_start=True)
        self._wait_for_reading()
        self.press(text)

    def enter(self, text: str, prompt: str = PROMPT) -> None:
        self.type(text + "\r", prompt)

    def _wait_for_reading(self) -> None:
        """Until the command has taken the terminal out of its line mode and waits for a key. A signal that comes
        earlier is not seen before the next key."""
        end, state = time.monotonic() + WAIT_S, Path(f"/proc/{self.pid}/task/{self.pid}/stat")
        while termios.tcgetattr(self.fd)[3] & termios.ICANON:
            assert time.monotonic() < end, "the terminal stays in its line mode"
            time.sleep(0.005)
        if not state.exists():  # not Linux
            time.sleep(0.5)
            return
        while state.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < end, "it does not wait for keys"
            time.sleep(0.005)

    def expect(self, words: str, *, at_start: bool = False) -> str:
        """What was shown up to and with these words, wherever lines were broken between them; `at_start` of a line."""
        pattern = re.compile("^" * at_start + r"\s+".join(map(re.escape, words.split(" "))), re.MULTILINE)
        end = time.monotonic() + WAIT_S
        while not (found := pattern.search(self.shown)):
            if time.monotonic() > end or not self._read(end):
                raise AssertionError(f"{words!r} did not come, but {self.shown!r}")
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def _read(self, end: float) -> bool:
        if not select.select([self.fd], [], [], max(0, end - time.monotonic()))[0]:
            return False
        try:
            text = os.read(self.fd, 65536).decode(errors="replace")
        except OSError as error:
            if error.errno != errno.EIO:  # which is the end
                raise
            return False
        self.raw += text
        self.shown += CONTROL.sub("", text).replace("\r", "")
        return bool(text)

    def status(self) -> int:
        """The exit status, once it has ended."""
        end = time.monotonic() + WAIT_S
        while self._read(end):
            pass
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            assert time.monotonic() < end, f"it does not end, after {self.shown!r}"
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(ended[1])

    def close(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self.fd)


class Server:
    """Answers chats with the number of the request and the last message; `endless` ones go on until the client leaves.
    `requests` are their bodies, `left` counts clients that went in the middle."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.left = 0
        self.extra: dict[str, Any] = {}
        self.models = ["large", "small"]
        self.address = ""

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        text = body["messages"][-1]["content"]
        if text == "refuse":
            return web.json_response({"error": {"message": "Not today.", "code": "no"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        send = [f"answer {len(self.requests)} to ", f"**{text.splitlines()[-1]}**"]
        try:
            for piece in send:
                await self.send(response, {"choices": [{"index": 0, "delta": {"content": piece}}]})
            while text == "endless":
                await self.send(response, {"choices": [{"index": 0, "delta": {"content": " more"}}]})
                await asyncio.sleep(0.01)
        except (ConnectionError, asyncio.CancelledError):
            self.left += 1
            raise
        await self.send(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 7, "completion_tokens": 9}
        await self.send(response, {"choices": [], "usage": usage, **self.extra})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def send(self, response: web.StreamResponse, chunk: Any) -> None:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@contextmanager
def serving() -> Iterator[Server]:
    """The server in a thread of its own."""
    found, loop, started = Server(), asyncio.new_event_loop(), threading.Event()

    async def start() -> TestServer:
        app = web.Application()
        app.router.add_get("/v1/models", found.list_models)
        app.router.add_post("/v1/chat/completions", found.chat)
        server = TestServer(app)
        await server.start_server()
        found.address = str(server.make_url("")).rstrip("/")
        return server

    def serve() -> None:
        server = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(server.close())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert started.wait(30)
        yield found
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def start(*arguments: str, **options: Any) -> Terminal:
        made.append(Terminal(tmp_path, *arguments, **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


def asked(server: Server) -> list[str]:
    """The last message of each request."""
    return [body["messages"][-1]["content"] for body in server.requests]


def test_a_conversation_with_a_server(server: Server, terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """A paste, several ways to write more lines, an answer that is stopped, again, saved; and the way out."""
    server.extra = {"metrics": {"speculative_decoding": DRAFTED, "time_to_first_token_ms": 12.0}}
    chat = terminal("chat", "--url", server.address, "--api-key", "sesame", "--temperature", "0")
    chat.expect(f"large at {server.address}")
    chat.type(f"{PASTE}one\rtwo\r\rthree{PASTED}")
    chat.press("\r")
    chat.expect("answer 1 to three\n")
    chat.expect("first after 12 ms, 2.50 tokens a step, 6 of 10 draft tokens accepted]\n")
    for lines in (['"""', "/quoted", 'text"""'], ["one\\", "two"], ["one\x1b\rtwo"]):
        for number, line in enumerate(lines):
            chat.enter(line, MORE if number else PROMPT)
        chat.expect("accepted]\n")
    assert asked(server) == ["one\ntwo\n\nthree", "/quoted\ntext", "one\ntwo", "one\ntwo"]
    chat.enter("\x1b[A\x1b[A\x1b[A\x1b[A")  # up to the paste
    chat.expect("accepted]\n")
    assert asked(server)[-1] == "one\ntwo\n\nthree"

    chat.enter("endless")
    chat.expect("answer 6 to endless more")
    chat.press("\x03")
    chat.expect("(stopped)\n")
    chat.enter("and now")
    chat.expect("answer 7 to and now\n")
    stopped = server.requests[-1]["messages"][-2]
    assert stopped["role"] == "assistant" and stopped["content"].startswith("answer 6 to **endless** more")
    chat.enter("/retry")
    chat.expect("answer 8 to and now\n")
    assert server.requests[7] == server.requests[6]
    chat.enter("/save talk.json")
    chat.expect("messages are in talk.json.\n")
    written = json.loads((tmp_path / "talk.json").read_text())
    assert written["model"] == "large"
    assert written["messages"][:-1] == server.requests[7]["messages"]
    assert written["messages"][-1] == {"role": "assistant", "content": "answer 8 to **and now**"}
    assert set(server.keys) == {"Bearer sesame"}
    assert server.requests[0]["temperature"] == 0
    assert set(server.requests[0]) == {"model", "messages", "stream", "stream_options", "temperature"}
    chat.type("\x04")
    assert chat.status() == 0
    assert server.left == 1
    assert "\x1b[?2004h" in chat.raw and "\x1b[1m" in chat.raw, "pastes are marked, Markdown is drawn"


def test_commands(server: Server, terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    chat = terminal("chat", "small", "--url", server.address, "--system", "Be brief.", columns=45)
    for line, told in {
        "/sytem x": "Did you mean '/system'",
        "/set temprature 1": "Did you mean 'temperature'",
        "/set temperature 1000": "temperature is 1000; it must be",
        "/set max_tokens 2.7": "max_tokens is 2.7; it must be",
        "/set ignore_eos maybe": "it must be on or off",
        "/set top-p 0.5": "top_p 0.5\n",
        "/set stop END": "stop ('END',)\n",
        "/set drafter ngram": "drafter ngram\n",
        "/set seed": "seed default\n",
        "/retry": "There is no message",
        "/save": "/save FILE",
        "/save notes.txt": "holds no",
        "/load none.json": "cannot be",
        "/clear now": "takes nothing",
        "/model lrge": "Did you mean 'large'",
        "/model large": f"large at {server.address}",
        "/model": "* large\n  small\n",
        "/system": "Be brief.\n",
        "/system Be long.": "is set",
        "/help": "/ goes in",
    }.items():
        chat.enter(line)
        chat.expect(told)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    chat.enter("hello")
    chat.expect("answer 1 to hello")
    body = server.requests[-1]
    assert body["messages"] == [{"role": "system", "content": "Be long."}, {"role": "user", "content": "hello"}]
    assert (body["model"], body["top_p"], body["stop"]) == ("large", 0.5, ["END"])
    assert body["speculative"] == {"drafter": "ngram"}
    chat.expect("first after")
    for line in ("/save a.json", "/clear", "/set drafter default", "/set top_p default"):
        chat.enter(line)
    chat.enter("refuse")
    chat.expect("specserve: Not today.")
    assert [message["content"] for message in server.requests[-1]["messages"]] == ["Be long.", "refuse"]
    assert not {"top_p", "speculative"} & server.requests[-1].keys()
    chat.enter("/load a.json")
    chat.expect("3 messages are loaded.")
    chat.enter("/retry")
    chat.expect("answer 3 to hello")
    assert [message["content"] for message in server.requests[-1]["messages"]] == ["Be long.", "hello"]
    chat.type("not sent")
    chat.expect("not sent")
    chat._wait_for_reading()
    chat.press("\x03")
    chat.expect("Ctrl-D or /bye")
    chat.enter("/bye")
    assert chat.status() == 0
    assert len(server.requests) == 3


def test_lines_that_come_together_are_a_paste_where_the_terminal_marks_none(
    server: Server, terminal: Callable[..., Terminal]
) -> None:
    chat = terminal("chat", "--url", server.address, TERM="dumb")
    chat.type("one\rtwo\rthr")
    chat.press("ee\r")
    chat.expect("answer 1 to **three**")
    assert asked(server) == ["one\ntwo\nthree"]
    chat.type("\x04")
    assert chat.status() == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("chat")
    return str(write_tiny_model(folder / "llama", "llama")), str(write_tiny_model(folder / "qwen3", "qwen3"))


SMALL = ("--dtype", "float32", "--kv-cache-gib", "0.05", "--max-model-len", "2048", "--max-tokens", "1900")


def test_a_conversation_with_a_model_here(folders: tuple[str, str], terminal: Callable[..., Terminal]) -> None:
    first, second = folders
    chat = terminal("run", first, *SMALL, "--ignore-eos", "--seed", "3")
    chat.expect("/help shows the commands")
    chat.enter("hello")
    chat.expect("hello\n")
    while len(chat.shown.strip()) < 20:
        assert chat._read(time.monotonic() + WAIT_S), "the answer has begun"
    chat.press("\x03")
    chat.expect("(stopped)\n")
    chat.enter("/set max_tokens 7")
    chat.enter("/set drafter ngrm")
    chat.expect("Did you mean 'ngram'")
    chat.enter("/set drafter ngram")
    chat.expect("drafter ngram\n")
    chat.enter("/retry")
    chat.expect("[7 tokens, ")
    chat.expect("/set max_tokens NUMBER")
    chat.enter("/model no-such-model")
    chat.expect("Unknown model 'no-such-model'.")
    chat.enter("/model /")
    chat.expect("specserve: ")
    chat.enter("/retry")
    chat.expect("[7 tokens, ")
    chat.enter(f"/model {second}")
    chat.enter("/model")
    chat.expect(f"* {second}\n")
    chat.enter("hello")
    chat.expect("[7 tokens, ")
    chat.enter("/bye")
    assert chat.status() == 0


def test_a_pipe_is_one_message(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(text: str, *more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        status = run(("chat", "--url", server.address, *more))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    assert call("two\n/lines\n") == (0, "answer 1 to **/lines**\n", "")
    assert asked(server) == ["two\n/lines"]
    assert call(" \n") == (0, "", "")
    assert call("refuse") == (1, "", "specserve: Not today.\n")
    status, out, err = call("x", "--model", "lrge")
    assert (status, out) == (2, "") and "Did you mean 'large'" in err
    assert "not these: threads" in call("x", "--threads", "1")[2]
    server.models = []
    assert "Name one with --model" in call("x")[2]


def test_only_engine_options_of_the_command_line_are_said_not_to_hold(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of the environment and of a file are for engines here. What a server is told comes from everywhere."""
    monkeypatch.chdir(tmp_path)
    Path("specserve.toml").write_text(
        'max-num-seqs = 2\nmodel = "small"\n[drafter_options]\nn = 4\n'
        '[chat]\nmax-tokens = 9\ngeneration-config = "none"\n'
    )
    monkeypatch.setenv("SPECSERVE_THREADS", "1")
    monkeypatch.setenv("SPECSERVE_TEMPERATURE", "0.5")

    def complaint(*more: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
        assert run(("chat", "--url", server.address, *more)) == 0
        return capsys.readouterr().err

    assert complaint() == ""
    body = server.requests[-1]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("small", 0.5, 9)
    assert complaint("--threads", "3") == "With --url the server's own options hold, not these: threads.\n"
    monkeypatch.setenv("SPECSERVE_URL", server.address)
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    assert run(("chat",)) == 0 and capsys.readouterr().err == ""


def test_a_pipe_to_a_model_here(
    folders: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = (*SMALL[:-1], "8")
    outs = []
    for arguments in (("chat", folders[0]), ("run", folders[0])):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nthere"))
        assert run((*arguments, *small, "--temperature", "0")) == 0
        outs.append(capsys.readouterr())
    assert run(("run", folders[0], "hello\nthere", *small, "--temperature", "0")) == 0
    assert outs[0].out == outs[1].out == capsys.readouterr().out != "\n"
    assert outs[0].err == outs[1].err == ""


# --- Markdown ---------------------------------------------------------------------------------------------------------

TEXT = """# Title

Hello **world**, this is a paragraph that is long enough to wrap at forty-five columns for sure.
Second line with `code` and [link](http://x.y/z).

- one
- two
  - nested

3. a
4. b

```python
for i in range(30):

    print(i)
```

| a | b |
|---|---|
| 1 | 2 |
| three hundred and more | averylongwordthatfitsinnocolumnofthattable |
| 5 | 6 |
| 7 | 8 |

<div>html</div>

Bye <b>bold</b>
"""


def screen(written: str, height: int) -> list[str]:
    """What a terminal shows in the end, scrolled lines included."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[\s\S]", written):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif part == "\r":
            column = 0
        elif part.endswith("A") and len(part) > 1:
            row -= int(part[2:-1])
            assert len(lines) - row <= height, "what has scrolled out cannot be written again"
        elif part == "\x1b[K":
            lines[row] = lines[row][:column]
        elif part == "\x1b[J":
            lines[row:] = [lines[row][:column]]
        elif not part.startswith("\x1b"):
            line = lines[row].ljust(column)
            lines[row], column = line[:column] + part + line[column + 1 :], column + 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize(("width", "height"), [(45, 8), (80, 30)])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_markdown_that_comes_in_pieces_is_that_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, width: int, height: int, size: int
) -> None:
    monkeypatch.setattr(cli_markdown, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(cli_markdown, "_SHARE", 1e9)
    shown = []
    for pieces, rows in (([TEXT[i : i + size] for i in range(0, len(TEXT), size)], height), ([TEXT], 10_000)):
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, width=width, height=rows, color_system="standard")
        writer = cli_markdown.MarkdownWriter(console)
        for piece in pieces:
            writer.write(piece)
        writer.close()
        shown.append(screen(file.getvalue(), rows))
    assert shown[0] == shown[1]
    text = "\n".join(shown[0])
    assert max(map(len, shown[0])) < width
    assert "link (http://x.y/z)" in " ".join(text.split())
    for words in ("<div>html</div>", "Bye <b>bold</b>", " 3 a\n 4 b\n", "    print(i)"):
        assert words in text
    assert "…" not in text
    assert "**" not in text


def test_only_lines_that_changed_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_markdown, "_SHARE", 1e9)
    monkeypatch.setattr(cli_markdown, "_INTERVAL_S", 0.0)
    file = io.StringIO()
    writer = cli_markdown.MarkdownWriter(Console(file=file, force_terminal=True, width=40, height=20))
    writer.write("- first\n- second\n- thi")
    before = len(file.getvalue())
    writer.write("rd")
    after = file.getvalue()[before:]
    assert "third" in after and "first" not in after and "second" not in after
    assert "\x1b[2J" not in after and "\x1b[2K" not in after


def test_no_color_and_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    writer = cli_markdown.MarkdownWriter(Console(file=file, force_terminal=True, width=60, color_system="truecolor"))
    writer.write("```python\nfor i in x: pass\n```\n\n# Title\n\n`code` \x1b[31mred\x07 \x9b2J")
    writer.close()
    written = file.getvalue()
    styles = {int(code) for found in re.findall(r"\x1b\[([0-9;]*)m", written) for code in found.split(";") if code}
    assert not styles & {*range(30, 50), *range(90, 108)}, "no colour"
    assert "\x07" not in written and "\x9b" not in written and "\x1b[31m" not in written and "␛[31mred␇" in written


# --- files and settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ("{}", "holds no conversation"),
        ('[{"role": "robot", "content": "x"}]', "message 1 must be an object whose role"),
        ('[{"role": "user", "content": "x"}, {"role": "user"}]', "message 2 must have its text"),
    ],
)
def test_files_that_hold_no_conversation(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=reason):
        saved.load(path)
    with pytest.raises(InputError, match="is kept"):
        saved.save(path, "m", [])
    assert path.read_text() == text


def test_a_conversation_is_written_and_read(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "y", "reasoning_content": "z"}]
    for _ in range(2):
        saved.save(tmp_path / "a.json", "m", messages)
    assert saved.load(tmp_path / "a.json") == messages
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(InputError, match="cannot be written"):
        saved.save(tmp_path / "none" / "a.json", "m", messages)


def test_every_setting_can_be_set() -> None:
    for name in settings.NAMES:
        if name != settings.DRAFTER:
            text = {"ignore_eos": "on", "stop": '["a", "b"]'}.get(name, "1")
            value = settings.value_of(name, text)
            assert value == {"ignore_eos": True, "stop": ("a", "b")}.get(name, 1)
        assert settings.parse(f"--{name.replace('_', '-')}=7") == (name, "7")
