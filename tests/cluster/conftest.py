"""Certificates for tests of connections."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, `ca` and `other`; `engine` and `server` are signed by the first."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        made = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}")
        openssl("req", "-x509", *key, *made)
    for name in ("engine", "server"):
        made = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}")
        names = ("-addext", "subjectAltName=IP:127.0.0.1,DNS:engine.example", "-addext", "basicConstraints=CA:FALSE")
        openssl("req", "-x509", *key, *made, *names, "-CA", "ca.pem", "-CAkey", "ca.key")
    return folder
