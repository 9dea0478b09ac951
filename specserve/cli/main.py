"""The command line's entry: the commands, where their options come from, how errors end. Imports no command: each is
loaded when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.config import Env

from specserve.cli.arguments import current
from specserve.cli.config import TomlFile, only_stated_with_others
from specserve.cli.failures import FAILED, INTERRUPTED, describe, status_of
from specserve.cli.help_layout import HelpFormatter
from specserve.errors import SpecserveError
from specserve.machine.surroundings import leave_removed_folder, open_standard_streams
from specserve.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

PREFIX = "SPECSERVE_"
CONFIGURATION = Group("Configuration", sort_key=1000)  # behind all others
CONFIG_FILE = "specserve.toml"
COMMANDS = {
    "generate": ("specserve.cli.generate:generate", "Complete prompts."),
    "chat": ("specserve.cli.chat:chat", "Talk to a model; tokens per second and acceptance after each answer."),
    "serve": ("specserve.cli.serve:serve", "Serve a model over HTTP with OpenAI's API."),
    "engine": ("specserve.cli.engine:engine", "Run a headless engine, for a server elsewhere."),
    "rank": ("specserve.cli.rank:rank", "Compute a part of a model that another host serves."),
    "dynamo": ("specserve.cli.dynamo:dynamo", "Run an engine as a worker of NVIDIA Dynamo."),
    "run": ("specserve.cli.run:run", "Talk to a model by name, which is fetched if it is not here."),
    "train": ("specserve.cli.train:train", "Train a draft head on what the target writes itself."),
    "bench": ("specserve.cli.bench:bench", "Measure drafters against plain decoding."),
    "grammar": (
        "specserve.cli.grammar:grammar",
        "Check what structured output can enforce; show grammars that come along.",
    ),
    "top": ("specserve.cli.top:top", "Watch a running server."),
    "pull": ("specserve.cli.pull:pull", "Fetch a model into the cache, or list what it holds."),
    "list": ("specserve.cli.list:list_models", "Show the models on this machine, or all that have a short name."),
    "rm": ("specserve.cli.rm:rm", "Remove models from this machine."),
    "ps": ("specserve.cli.ps:ps", "Show the servers that run on this machine."),
    "inspect": ("specserve.cli.inspect:inspect", "Say what a checkpoint is: a draft head or a model, and for whom."),
    "doctor": ("specserve.cli.doctor:doctor", "Show the device, memory, kernels, model folder and versions."),
    "completion": ("specserve.cli.completion:completion", "Install completion of commands and options for a shell."),
}
CONFIG = Parameter(
    group=CONFIGURATION,
    help=f"TOML file with options [default: {CONFIG_FILE}, if it exists].",
    env_var=f"{PREFIX}CONFIG",
    show_env_var=False,
)
EPILOGUE = (
    f"Every option can also be set by an environment variable ({PREFIX}MAX_NUM_SEQS=4) and in {CONFIG_FILE} (or the "
    "file given with --config): engine options at the top, a table for each command. Flags win over the environment, "
    "and the environment over the file."
)


def build_app() -> App:
    """The command tree, with a meta command in front that handles --config."""
    app = App(
        name="specserve",
        help="A latency-first LLM engine built around speculative decoding.",
        help_epilogue=EPILOGUE,
        help_format="plaintext",
        help_formatter=HelpFormatter(),
        console=_console(),
        version=__version__,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for name, (path, text) in COMMANDS.items():
        app.command(path, name=name, help=text)
    app.meta.suppress_keyboard_interrupt = False
    app.meta.default(_with_config(app))
    return app


def _console() -> Console | None:
    """What help is printed to: cyclopts' own, made when it is needed, unless it must be another."""
    if not os.environ.get("NO_COLOR"):
        return None
    from specserve.terminal import console

    return console()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, 1 when the engine, a server or the system failed, 2 for a wrong request or
    option, 130 on Ctrl-C."""
    open_standard_streams()
    leave_removed_folder()
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit status. With SPECSERVE_DEBUG=1 errors keep their traceback."""
    try:
        build_app().meta(list(arguments), exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # as of `specserve list | head -1`
        _drop_output()
        return FAILED
    except (SpecserveError, CycloptsError, OSError) as error:
        if os.environ.get(PREFIX + "DEBUG") == "1":
            raise
        print(f"specserve: {describe(error)}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # a full disk
            _drop_output()
        return status_of(error)
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # behind the terminal's ^C
        return INTERRUPTED


def _drop_output() -> None:
    """Standard output takes no more: Python flushes it once again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_config(app: App) -> Callable[..., None]:
    def launch(
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        config: Annotated[Path | None, CONFIG] = None,
    ) -> None:
        app.config = _sources(config)
        app(current(tokens), exit_on_error=False, print_error=False)

    return launch


def _sources(config: Path | None) -> tuple[Callable[..., None], ...]:
    """Where options come from besides flags, strongest first."""
    environment = Env(PREFIX, command=False, show=False)
    if config is None and not Path(CONFIG_FILE).is_file():
        return (environment, only_stated_with_others)
    return (environment, TomlFile(config or Path(CONFIG_FILE), tuple(COMMANDS)), only_stated_with_others)
