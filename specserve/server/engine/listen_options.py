"""What a headless engine is told at start, besides what its engine is told."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from specserve.errors import ConfigError, strict_fields, unknown
from specserve.help import Help
from specserve.parallel.address import Address
from specserve.parallel.security import check_plaintext, engine_tls, peer_tls, read_secret
from specserve.server.options import LOG_FORMATS, LOG_LEVELS, between

ROLES = ("both", "prefill", "decode")


@strict_fields("option", ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineListenOptions:
    """Where an engine waits for a server, and whom it lets in. Times are in seconds.

    `listen` is HOST:PORT, port 0 any that is free. `secret_file` holds what both sides must know. Without `tls_cert`
    and `tls_key` only a loopback address is listened on, unless `insecure_no_tls`. With `tls_ca` a server needs a
    certificate that it signed. `role`: the engine answers and computes the prompts of what it answers ("both"), leaves
    prompts to others of the server's engines ("decode"), or only computes these ("prefill"); then others fetch KV at
    `kv_address`, or where the server connects to it. `peer_ca` signed the certificates of the engines that KV is
    fetched from; without it that is `tls_ca`. Raises ConfigError naming the field, what it was and what is allowed.
    """

    listen: Annotated[str, Help("HOST:PORT that servers connect to; port 0 is any that is free.", "Listening")] = (
        "127.0.0.1:7000"
    )
    secret_file: Annotated[
        Path | None, Help("File with the secret that servers must know; 16 characters or more.", "Access")
    ] = None
    tls_cert: Annotated[Path | None, Help("PEM file with the certificate chain; makes it TLS.", "Listening")] = None
    tls_key: Annotated[Path | None, Help("PEM file with the certificate's private key.", "Listening")] = None
    tls_ca: Annotated[Path | None, Help("PEM file: servers need a certificate that one of these signed.", "Access")] = (
        None
    )
    insecure_no_tls: Annotated[
        bool, Help("Listen without TLS where other machines can connect; they and all between can read it.", "Access")
    ] = False
    role: Annotated[
        Literal["both", "prefill", "decode"],
        Help(
            "prefill: only compute prompts, for engines with decode, which answer; both: compute what one answers.",
            "Operation",
        ),
    ] = "both"
    kv_address: Annotated[
        str,
        Help(
            "HOST:PORT where others fetch KV from this engine [default: where its server connects to it].",
            "Operation",
        ),
    ] = ""
    peer_ca: Annotated[
        Path | None,
        Help(
            "PEM file of the authorities that signed other engines' certificates [default: --tls-ca].",
            "Operation",
        ),
    ] = None
    drain_timeout_s: Annotated[float, Help("Seconds that running requests get after SIGTERM.", "Limits")] = 30.0
    stall_timeout_s: Annotated[
        float, Help("Seconds without progress after which the engine is started again.", "Limits")
    ] = 9.5
    start_timeout_s: Annotated[float, Help("Seconds until the engine must be ready.", "Limits")] = 900.0
    log_format: Annotated[Literal["text", "json"], Help("Lines for people, or JSON objects.")] = "text"
    log_level: Annotated[str, Help("Least important messages that are shown.")] = "info"

    def __post_init__(self) -> None:
        words = {"log_format": LOG_FORMATS, "log_level": LOG_LEVELS, "role": ROLES}
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"--{name.replace('_', '-')}: " + unknown("value", str(getattr(self, name)), allowed))
        for name in ("stall_timeout_s", "start_timeout_s"):
            between(name, getattr(self, name), 0.05, 1e6)
        between("drain_timeout_s", self.drain_timeout_s, 0, 1e6)
        self._check_role()
        tls_options = "--tls-cert and --tls-key"
        if self.tls_cert is None and self.tls_key is None:
            check_plaintext(self.address, self.insecure_no_tls, tls_options, "--insecure-no-tls")
        elif self.insecure_no_tls:
            raise ConfigError(f"--insecure-no-tls and {tls_options} contradict each other. Leave one of them out.")

    def _check_role(self) -> None:
        if self.kv_address:
            Address.parse(self.kv_address, "--kv-address")
            if self.role != "prefill":
                raise ConfigError("--kv-address is where others fetch KV from an engine with --role prefill.")
        if self.peer_ca is not None and self.role != "decode":
            raise ConfigError("--peer-ca is for an engine that fetches KV from others, with --role decode.")
        if self.role == "decode" and self.tls_cert is not None and self.peer_ca is None and self.tls_ca is None:
            raise ConfigError(
                "--role decode: with TLS this engine checks the certificates of those that it fetches KV from. Give "
                "--peer-ca, the authorities that signed them."
            )

    @property
    def address(self) -> Address:
        return Address.parse(self.listen, "--listen")

    def secret(self) -> bytes:
        """Raises ConfigError where there is none."""
        return read_secret(self.secret_file, "--secret-file")

    def peer_tls(self) -> ssl.SSLContext | None:
        """For connections to other engines; None: without TLS. Raises ConfigError for files that cannot be used."""
        return peer_tls(self.peer_ca or self.tls_ca, self.tls_cert, self.tls_key)

    def check_peer(self, address: Address) -> None:
        """Raises ConfigError where another engine must not be connected to without TLS."""
        check_plaintext(address, self.insecure_no_tls, "--peer-ca", "--insecure-no-tls")

    def tls(self) -> ssl.SSLContext | None:
        """Raises ConfigError for files that cannot be used."""
        return engine_tls(self.tls_cert, self.tls_key, self.tls_ca)
