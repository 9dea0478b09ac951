"""Certificates of one run: who has one of its authority is let in, at the address that it is for."""

from __future__ import annotations

import importlib.util
import os
import ssl
from pathlib import Path

import pytest

if importlib.util.find_spec("cryptography") is None and not os.environ.get("SPECSERVE_REQUIRE_RAY"):
    pytest.skip("specserve[ray] is not installed", allow_module_level=True)

from specserve.cluster.certificates import Issued, issue, make_authority
from specserve.parallel.security import engine_tls, server_tls


def files(folder: Path, name: str, issued: Issued) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    certificate.write_text(issued.certificate)
    key.write_text(issued.key)
    return certificate, key


def shake_hands(engine: ssl.SSLContext, server: ssl.SSLContext, host: str) -> None:
    """Raises SSLError where one does not trust the other."""
    to_engine, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    listening = engine.wrap_bio(to_engine, to_server, server_side=True)
    connecting = server.wrap_bio(to_server, to_engine, server_hostname=host)
    for _ in range(4):
        for side in (connecting, listening):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
    connecting.do_handshake()
    listening.do_handshake()


def contexts(folder: Path, engine: Issued, server: Issued, authority: Issued) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The first trusts `authority`, the second who signed the engine's certificate."""
    trusted, _ = files(folder, "authority", authority)
    made = engine_tls(*files(folder, "engine", engine), trusted), server_tls(trusted, *files(folder, "server", server))
    assert made[0] is not None and made[1] is not None
    return made[0], made[1]


@pytest.mark.parametrize("host", ["10.1.2.3", "fd00::2", "engine-1.example"])
def test_both_sides_trust_each_other(tmp_path: Path, host: str) -> None:
    authority = make_authority()
    engine, server = contexts(tmp_path, issue(authority, host), issue(authority, "server"), authority)
    shake_hands(engine, server, host)


@pytest.mark.parametrize("side", ["engine", "server"])
def test_a_certificate_of_another_run_is_refused(tmp_path: Path, side: str) -> None:
    authority, other = make_authority(), make_authority()
    issuers = {"engine": authority, "server": authority} | {side: other}
    engine = issue(issuers["engine"], "10.1.2.3")
    made = contexts(tmp_path, engine, issue(issuers["server"], "server"), authority)
    with pytest.raises(ssl.SSLError, match=r"(?i)verify failed|unknown ca"):
        shake_hands(*made, "10.1.2.3")


def test_a_certificate_of_another_machine_is_refused(tmp_path: Path) -> None:
    authority = make_authority()
    made = contexts(tmp_path, issue(authority, "10.1.2.4"), issue(authority, "server"), authority)
    with pytest.raises(ssl.SSLError, match="IP address mismatch"):
        shake_hands(*made, "10.1.2.3")


def test_what_is_issued_cannot_issue(tmp_path: Path) -> None:
    authority = make_authority()
    issued = issue(authority, "10.1.2.3")
    forged = issue(issued, "10.1.2.3")
    chain = Issued(forged.certificate + issued.certificate, forged.key)
    made = contexts(tmp_path, chain, issue(authority, "server"), authority)
    with pytest.raises(ssl.SSLError, match="verify failed"):
        shake_hands(*made, "10.1.2.3")
