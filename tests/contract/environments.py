"""Virtual environments for the clients, made once for each list of requirements. Knows pip; knows no client."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements")
# Environments that see the project's packages behind their own: torch alone takes minutes to install.
SHARING = ("lm_eval",)
_VERSIONS = "import importlib.metadata as m, sys; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"


def environment(name: str, folder: Path) -> Path:
    """The Python of the environment `name` in `folder`, which is made anew when requirements/NAME.txt has changed or
    the last attempt did not end. Raises CalledProcessError when pip fails; it has said why."""
    wanted = (REQUIREMENTS / f"{name}.txt").read_text("utf-8")
    home = folder / name
    python = home / "bin" / "python"
    stamp = home / "requirements.txt"
    if not stamp.is_file() or stamp.read_text("utf-8") != wanted:
        print(f"-- making the environment {home}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        if name in SHARING:
            _site_packages(python).joinpath("project.pth").write_text(sysconfig.get_path("platlib"), "utf-8")
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(REQUIREMENTS / f"{name}.txt")], check=True)
        stamp.write_text(wanted, "utf-8")
    return python


def _site_packages(python: Path) -> Path:
    command = [str(python), "-c", 'import sysconfig; print(sysconfig.get_path("purelib"))']
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def versions(folder: Path, name: str, packages: Iterable[str]) -> str:
    """What the environment `name` has of these packages, as `name version`, separated by commas."""
    command = [str(folder / name / "bin" / "python"), "-c", _VERSIONS, *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "not installed"
