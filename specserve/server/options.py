"""What a server is told at start, besides what its engine is told."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from specserve.errors import ConfigError, strict_fields, unknown
from specserve.files import read_text
from specserve.help import Help
from specserve.parallel.address import Address
from specserve.parallel.handshake import LONGEST_HEARTBEAT_S, SHORTEST_HEARTBEAT_S
from specserve.parallel.security import check_plaintext

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
REASONING_FORMATS = ("auto", "none")
_MOST_KEY_BYTES = 2**20
MOST_REPLICAS = 64
MOST_API_PROCESSES = 32
FCFS, PRIORITY = SCHEDULING_POLICIES = ("fcfs", "priority")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_.~-]+)*")
_HOST = re.compile(r"\*|[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@strict_fields("option", ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where to listen, whom to let in, how long to be patient. Times are in seconds, 0 is no limit where it says so.

    `engine`: headless engines, "host:port", that serve instead of engines of this machine; both sides prove that they
    know the secret of `engine_secret_file`. Without `engine_ca` only loopback addresses, unless
    `engine_insecure_no_tls`.
    `uds` is listened on instead of host and port. `served_model_name`: names that requests may use, the first of them
    is the one in answers; without any it is the model's. `data_parallel_size`: engines, 1 to 64, that serve the model
    side by side, each with `max_num_seqs` places; the last `prefill_replicas` of them only compute prompts
    for the others, those with at least `prefill_min_tokens` tokens that are not cached, or None where it costs more to
    compute them than to send their KV; with `enable_expert_parallel` each has some of the model's experts, and all step
    together. `api_processes`: processes, 1 to 32, that answer HTTP; with one it is
    the one that has the engines. `max_queue`: completions that may wait for the engine beside
    those that run. `max_tokenize_characters`: most of a text that /tokenize and count_tokens take, and of a prompt
    where nothing is known of the fewest tokens that it can have. `scheduling_policy`: requests run as they come
    ("fcfs"), and one that has a priority of its own is refused; or such as have one are taken ("priority"), and any
    client can send it. `reasoning_format`: reasoning that a model marks as its files say is told apart from its answers
    to conversations ("auto"), or is text as all else ("none"). `api_key` and the lines of `api_key_file` are keys; with
    any, all routes but /live, /health, /ready and the pages / and /docs with their scripts in /static need one.
    `allowed_host`: names besides localhost and addresses that the Host of a request may have ("*" is any); without any,
    Host is looked at only where `host` is an address that this machine alone can reach.
    `share_drafts`: requests without a key or a cache_salt draft from each other's answers; else nothing is kept of
    them.
    `root_path` stands before all paths where clients see them, behind a proxy. `generation_config`: where the sampling
    values are from that requests get which do not say them, see `stated_by`. `chat_template` takes the place of the
    model's; `default_chat_template_kwargs` is JSON of what it is given where a request says nothing else.
    Raises ConfigError naming the field, what it was and what is allowed.
    """

    host: Annotated[str, Help("Address to listen on; 0.0.0.0 is every one.", "Listening")] = "127.0.0.1"
    port: Annotated[int, Help("Port to listen on; 0 is any that is free.", "Listening")] = 8000
    uds: Annotated[Path | None, Help("Unix socket to listen on instead; only its owner may connect.", "Listening")] = (
        None
    )
    root_path: Annotated[str, Help("Path that stands before all others behind a proxy, such as /llm.", "Listening")] = (
        ""
    )
    served_model_name: Annotated[
        tuple[str, ...], Help("Name of the model in requests; may be repeated, the first is in answers.", "Listening")
    ] = ()
    api_key: Annotated[
        tuple[str, ...],
        Help(
            "A key that lets requests in; may be repeated. With any, only /live, /health, /ready, /, /docs and /static "
            "are open.",
            "Access",
        ),
    ] = ()
    api_key_file: Annotated[Path | None, Help("File with one key a line.", "Access")] = None
    cors_origin: Annotated[
        tuple[str, ...], Help('Origin whose web pages may call; may be repeated, "*" is all.', "Access")
    ] = ()
    allowed_host: Annotated[
        tuple[str, ...],
        Help(
            'Name in the Host header, besides localhost and addresses; may be repeated, "*" is all. Checked on '
            "loopback.",
            "Access",
        ),
    ] = ()
    share_drafts: Annotated[
        bool,
        Help(
            "Draft for requests without a key or cache_salt from each other's answers; times and counts tell of these.",
            "Access",
        ),
    ] = False
    tls_cert: Annotated[Path | None, Help("PEM file with the certificate chain; makes it HTTPS.", "Listening")] = None
    tls_key: Annotated[Path | None, Help("PEM file with the certificate's private key.", "Listening")] = None
    engine: Annotated[
        tuple[str, ...],
        Help(
            "HOST:PORT of a headless engine (specserve engine) that serves, in place of engines here; may be repeated.",
            "Engines elsewhere",
        ),
    ] = ()
    engine_secret_file: Annotated[
        Path | None, Help("File with the secret that these engines know.", "Engines elsewhere")
    ] = None
    engine_ca: Annotated[
        Path | None,
        Help("PEM file of the authorities that signed these engines' certificates; makes it TLS.", "Engines elsewhere"),
    ] = None
    engine_cert: Annotated[
        Path | None, Help("PEM file with this server's certificate, for engines that ask for one.", "Engines elsewhere")
    ] = None
    engine_key: Annotated[Path | None, Help("PEM file with that certificate's private key.", "Engines elsewhere")] = (
        None
    )
    engine_insecure_no_tls: Annotated[
        bool, Help("Connect to other machines without TLS; all between can read it.", "Engines elsewhere")
    ] = False
    engine_heartbeat_s: Annotated[
        float, Help("Seconds of silence after which an engine, or the server, counts as gone.", "Engines elsewhere")
    ] = 3.0
    data_parallel_size: Annotated[
        int, Help("Engines that serve side by side, each with its share of cores and memory.", "Operation")
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Help("Divide a model's experts among these engines, which then step together.", "Operation"),
    ] = False
    api_processes: Annotated[
        int, Help("Processes that answer HTTP on this address; they share the engines.", "Operation")
    ] = 1
    prefill_replicas: Annotated[
        int, Help("How many of these engines only compute prompts for the others.", "Operation")
    ] = 0
    prefill_min_tokens: Annotated[
        int | None,
        Help(
            "Least tokens of a prompt, but those that are cached, that go to such an engine [default: as measured].",
            "Operation",
        ),
    ] = None
    max_queue: Annotated[int, Help("Completions that may wait; more are refused with 429.", "Limits")] = 512
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Help("fcfs: first come, first served; priority: any request may have a priority of its own."),
    ] = "fcfs"
    reasoning_format: Annotated[
        Literal["auto", "none"],
        Help("auto: what a model thinks before it answers a conversation is told apart; none: it is text."),
    ] = "auto"
    max_body_mib: Annotated[float, Help("Largest body of a request, in MiB.", "Limits")] = 16.0
    max_tokenize_characters: Annotated[int, Help("Longest text that /tokenize and count_tokens take.", "Limits")] = (
        2**20
    )
    header_timeout_s: Annotated[float, Help("Seconds for a request's first line and headers.", "Limits")] = 10.0
    body_timeout_s: Annotated[float, Help("Seconds for a request's body.", "Limits")] = 30.0
    queue_timeout_s: Annotated[
        float, Help("Seconds a request may wait for its grammar and its first step; 0 is no limit.", "Limits")
    ] = 120.0
    request_timeout_s: Annotated[float, Help("Seconds a request may take in all; 0 is no limit.", "Limits")] = 0.0
    write_timeout_s: Annotated[float, Help("Seconds in which a client may take nothing of its answer.", "Limits")] = (
        30.0
    )
    drain_timeout_s: Annotated[float, Help("Seconds that running requests get after SIGTERM.", "Limits")] = 30.0
    stall_timeout_s: Annotated[
        float, Help("Seconds without progress after which the engine is started again.", "Limits")
    ] = 9.5
    start_timeout_s: Annotated[float, Help("Seconds until the engine must be ready.", "Limits")] = 900.0
    status_interval_s: Annotated[float, Help("Seconds between two lines of live status; 0 is none.")] = 10.0
    log_format: Annotated[Literal["text", "json"], Help("Lines for people, or JSON objects.")] = "text"
    log_level: Annotated[str, Help("Least important messages that are shown.")] = "info"
    admin: Annotated[
        bool, Help("Answer POST /reset_prefix_cache, and those that load and unload adapters.", "Access")
    ] = False
    generation_config: Annotated[
        str,
        Help(
            "Sampling values of requests that say none: auto takes the model's generation_config.json, none takes "
            "none; or a file or folder."
        ),
    ] = "auto"
    chat_template: Annotated[Path | None, Help("Jinja file to use in place of the model's chat template.")] = None
    default_chat_template_kwargs: Annotated[
        str,
        Help(
            "JSON object of values for the chat template that a request may replace, such as "
            '{"enable_thinking": false}.'
        ),
    ] = "{}"

    def __post_init__(self) -> None:
        words = {"log_format": LOG_FORMATS, "log_level": LOG_LEVELS, "scheduling_policy": SCHEDULING_POLICIES}
        words["reasoning_format"] = REASONING_FORMATS
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"--{name.replace('_', '-')}: " + unknown("value", str(getattr(self, name)), allowed))
        between("port", self.port, 0, 65535)
        between("data_parallel_size", self.data_parallel_size, 1, MOST_REPLICAS)
        if not isinstance(self.data_parallel_size, int):
            raise ConfigError(f"data_parallel_size is {self.data_parallel_size}; engines are whole.")
        between("api_processes", self.api_processes, 1, MOST_API_PROCESSES)
        if not isinstance(self.api_processes, int):
            raise ConfigError(f"api_processes is {self.api_processes}; processes are whole.")
        self._check_prefill()
        self._check_experts()
        self._check_engines()
        between("max_queue", self.max_queue, 0, 2**20)
        for name in ("header_timeout_s", "body_timeout_s", "write_timeout_s", "stall_timeout_s", "start_timeout_s"):
            between(name, getattr(self, name), 0.05, 1e6)
        for name in ("queue_timeout_s", "request_timeout_s", "drain_timeout_s", "status_interval_s"):
            between(name, getattr(self, name), 0, 1e6)
        between("max_tokenize_characters", self.max_tokenize_characters, 1, 2**30)
        between("max_body_mib", self.max_body_mib, 0.001, 1024)
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"--root-path is {self.root_path!r}; it must be a path such as /llm, with a slash before it and none "
                "after it."
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together. Give both or none of them.")
        for host in self.allowed_host:
            if not _HOST.fullmatch(host):
                raise ConfigError(f'--allowed-host is {host!r}; it must be a name without port or scheme, or "*".')
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("--api-key is empty. Give a key, or leave the option out.")
        for key in self.api_key:
            _check_key(key, "--api-key")

    def _check_prefill(self) -> None:
        between("prefill_replicas", self.prefill_replicas, 0, MOST_REPLICAS - 1)
        if not isinstance(self.prefill_replicas, int):
            raise ConfigError(f"prefill_replicas is {self.prefill_replicas}; engines are whole.")
        if self.prefill_replicas and self.prefill_replicas >= self.data_parallel_size:
            raise ConfigError(
                f"--prefill-replicas is {self.prefill_replicas} of {self.data_parallel_size} engines, and one at least "
                "must answer. Give a larger --data-parallel-size. All of them are on this machine: --backend ray has "
                "none that only compute prompts."
            )
        if self.prefill_min_tokens is not None:
            if not self.prefill_replicas and not self.engine:
                raise ConfigError(
                    "--prefill-min-tokens says what goes to --prefill-replicas, or to engines elsewhere with --role "
                    "prefill (--engine), and there are none."
                )
            between("prefill_min_tokens", self.prefill_min_tokens, 1, 2**31)

    def _check_experts(self) -> None:
        if not self.enable_expert_parallel:
            return
        if self.data_parallel_size == 1:
            raise ConfigError(
                "--enable-expert-parallel divides experts among engines of this machine, and there is one. Give "
                "--data-parallel-size."
            )
        if self.prefill_replicas:
            raise ConfigError(
                "--enable-expert-parallel and --prefill-replicas: engines that step together would wait for those that "
                "compute prompts. Leave one of the two out."
            )

    def _check_engines(self) -> None:
        addresses = [str(Address.parse(each, "--engine")) for each in self.engine]
        between("engine_heartbeat_s", self.engine_heartbeat_s, SHORTEST_HEARTBEAT_S, LONGEST_HEARTBEAT_S)
        if len(set(addresses)) < len(addresses):
            raise ConfigError(f"--engine: an engine serves once, and these are {', '.join(addresses)}.")
        if not self.engine:
            return
        if len(self.engine) > MOST_REPLICAS:
            raise ConfigError(f"--engine names {len(self.engine)} engines; {MOST_REPLICAS} are allowed.")
        if self.data_parallel_size != 1:
            raise ConfigError(
                "--engine names engines elsewhere and --data-parallel-size starts some here; a server has the ones or "
                "the others. For more engines here start each with `specserve engine` and name it with --engine."
            )
        if self.engine_ca is not None and self.engine_insecure_no_tls:
            raise ConfigError("--engine-ca and --engine-insecure-no-tls contradict each other. Leave one of them out.")
        if self.engine_ca is None:
            for each in self.engine:
                address = Address.parse(each, "--engine")
                check_plaintext(address, self.engine_insecure_no_tls, "--engine-ca", "--engine-insecure-no-tls")

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * 2**20)

    def keys(self) -> list[str]:
        """All API keys. Raises ConfigError for a file that cannot be read or has none."""
        return [*self.api_key, *([] if self.api_key_file is None else _read_keys(self.api_key_file))]


def _read_keys(path: Path) -> list[str]:
    """One key a line; empty lines and those that begin with # are none."""
    try:
        lines = [line.strip() for line in read_text(path, _MOST_KEY_BYTES, pipes=True).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}.") from error
    keys = {number: line for number, line in enumerate(lines, start=1) if line and not line.startswith("#")}
    for number, key in keys.items():
        _check_key(key, f"--api-key-file {path}, line {number},")
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no keys; write one a line.")
    return list(keys.values())


def _check_key(key: str, what: str) -> None:
    """One that clients cannot send as it is would let nobody in. It is not shown: logs keep what errors say."""
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(f"{what} cannot be sent in a header. Keys are printable ASCII without spaces around them.")


def between(name: str, value: Any, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}.")
