"""The source distribution holds what the checkout has, and nothing of an environment or a build that lies in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {".ci/run"}
ADDED = {"PKG-INFO"}


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a checkout")
def test_it_holds_what_git_does_not_ignore(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, check=True)
    (made,) = tmp_path.glob("specserve-*.tar.gz")
    with tarfile.open(made) as archive:
        held = {member.name.partition("/")[2] for member in archive if not member.isdir()}
    assert held - ADDED - known == set()
    assert known - LEFT_OUT - held == set()
