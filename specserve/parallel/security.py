"""What keeps others out between a server and engines elsewhere: a shared secret, and TLS."""

from __future__ import annotations

import ssl
from pathlib import Path

from specserve.errors import ConfigError
from specserve.files import check_regular, read_text
from specserve.parallel.address import Address

FEWEST_SECRET_CHARACTERS = 16
_MOST_SECRET_BYTES = 4096


def read_secret(path: Path | None, option: str) -> bytes:
    """The secret in a file, without spaces around it. Raises ConfigError, which never shows it."""
    if path is None:
        raise ConfigError(f"{option} is missing: engine and server prove to each other that they know one secret.")
    try:
        secret = read_text(path, _MOST_SECRET_BYTES, pipes=True).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}.") from error
    if len(secret) < FEWEST_SECRET_CHARACTERS:
        raise ConfigError(
            f"{option} {path} holds {len(secret)} characters; a secret has at least {FEWEST_SECRET_CHARACTERS}. "
            f"Make one with `openssl rand -hex 32 > {path}`."
        )
    return secret.encode()


def check_plaintext(address: Address, is_allowed: bool, tls_options: str, option: str) -> None:
    """Raises ConfigError for an address of another machine without TLS, unless `option` was given."""
    if not is_allowed and not address.is_loopback:
        raise ConfigError(
            f"{address} is not a loopback address, and without TLS anyone on the way can read prompts and answers. "
            f"Give {tls_options}, or {option} where nobody else has access to that network."
        )


def engine_tls(cert: Path | None, key: Path | None, ca: Path | None) -> ssl.SSLContext | None:
    """Of an engine that listens; None without a certificate. With `ca` servers must have a certificate, too. Raises
    ConfigError."""
    if (cert is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key belong together. Give both or none of them.")
    if cert is None or key is None:
        if ca is not None:
            raise ConfigError("--tls-ca is for TLS. Give --tls-cert and --tls-key as well, or leave it out.")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load_cert(context, cert, key, f"--tls-cert {cert} and --tls-key {key}")
    if ca is not None:
        _load_ca(context, ca, "--tls-ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def server_tls(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Of a server that connects to engines; None without `ca`, which must have signed their certificates. Raises
    ConfigError."""
    if (cert is None) != (key is None):
        raise ConfigError("--engine-cert and --engine-key belong together. Give both or none of them.")
    if ca is None:
        if cert is not None:
            raise ConfigError("--engine-cert is for TLS. Give --engine-ca as well, or leave it out.")
        return None
    return _client_tls((ca, "--engine-ca"), cert, key, f"--engine-cert {cert} and --engine-key {key}")


def peer_tls(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Of an engine that connects to others, to which it shows its own certificate; None without `ca`, which must have
    signed theirs. Raises ConfigError."""
    return None if ca is None else _client_tls((ca, "--peer-ca"), cert, key, f"--tls-cert {cert} and --tls-key {key}")


def _client_tls(ca: tuple[Path, str], cert: Path | None, key: Path | None, what: str) -> ssl.SSLContext:
    """`ca` with the name of its option, `what` those of the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which checks certificates and the names in them
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_ca(context, *ca)
    if cert is not None and key is not None:
        _load_cert(context, cert, key, what)
    return context


def _load_cert(context: ssl.SSLContext, cert: Path, key: Path, what: str) -> None:
    try:
        for path in (cert, key):
            check_regular(path)
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{what} cannot be used: {error}.") from error


def _load_ca(context: ssl.SSLContext, ca: Path, option: str) -> None:
    try:
        check_regular(ca)
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{option} {ca} cannot be used: {error}. It is a PEM file of certificates.") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody is there to be asked for its password")
