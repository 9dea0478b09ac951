"""The Triton kernels compile for real chips, without one: see triton_compiled.py and triton_compiled_integers.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize("file", sorted(Path(__file__).parent.glob("triton_compiled*.py")), ids=lambda file: file.stem)
def test_kernels_compile(tmp_path: Path, file: Path) -> None:
    """In a process of its own: where Triton interprets, it does not compile."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, str(file)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
