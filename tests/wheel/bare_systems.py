"""Installs the wheel in systems that have nothing but Python, made with debootstrap, and uses it there as a newcomer
does: an answer of a model that is fetched, one of a model that is here, the list of models, and the model's removal.

    make wheel && sudo .venv/bin/python tests/wheel/bare_systems.py bookworm trixie

A release is a name that debootstrap knows, or NAME=MIRROR for one of another mirror. Prints the times and what it takes
on the disk, and exits with 1 at the first step that fails. Needs root, debootstrap, unshare (util-linux), a network for
packages, and 4 GB of disk, or 12 where PyTorch's build for CUDA is what pip finds: `--packages` names a folder that pip
looks into as well, for a build for CPUs. Systems are removed at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "python3,python3-venv,ca-certificates"
TOOLS = ("debootstrap", "unshare", "chroot", "mount")
CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
# What of this machine's environment is about reaching an index. Folders of this machine are not there.
PASSED = (*CERTIFICATES, "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT")
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
ENTER = (
    'mount -t proc proc "$0/proc" && mkdir -p "$0/dev/shm" && mount -t tmpfs tmpfs "$0/dev/shm" && '
    'exec chroot "$0" "$@"'
)
LIMIT_S = 1800.0  # for one step, on a slow network
PIP = ("/venv/bin/python", "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")
MODELS = "/root/.cache/specserve"


def fail(what: str) -> None:
    sys.exit(f"FAILED: {what}")


@dataclass(frozen=True, slots=True)
class Step:
    """What a command printed, and the seconds to its first byte and to its end."""

    output: str
    first_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class System:
    """One bare system below `root`."""

    root: Path

    def run(self, *command: str) -> Step:
        """Runs a command in the system; its mounts and processes end with it. Exits where it fails."""
        names = [name for name in (*PASSED, *PROXIES) if name in os.environ]
        environment = {name: os.environ[name] for name in names}
        environment |= {"PATH": "/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
        inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, str(self.root), *command]
        begin = time.monotonic()
        with (self.root / "errors").open("w+") as errors:
            with subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=errors, env=environment) as process:
                assert process.stdout is not None
                first = process.stdout.read(1)
                first_s = time.monotonic() - begin
                output = (first + process.stdout.read()).decode()
                status = process.wait(LIMIT_S)
            errors.seek(0)
            if status:
                fail(f"{self.root.name}: {' '.join(command)} ended with {status}\n{output}{errors.read()}")
        return Step(output, first_s, time.monotonic() - begin)

    def megabytes(self, path: str) -> float:
        """What a path takes on the disk; 0 where it does not exist."""
        if not (self.root / path.lstrip("/")).exists():
            return 0.0
        return float(self.run("du", "--summarize", "--block-size=1000", path).output.split()[0]) / 1000


def make(release: str, components: str, folder: Path) -> System:
    """A system of this release, with this machine's name servers and certificates."""
    name, _, mirror = release.partition("=")
    system = System(folder / name)
    options = ("--variant=minbase", f"--include={PACKAGES}", f"--components={components}")
    command = ["debootstrap", *options, name, str(system.root)]
    done = subprocess.run([*command, *([mirror] if mirror else [])], capture_output=True, text=True)
    if done.returncode:
        fail(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr}")
    for path in {"/etc/resolv.conf", *(os.environ[name] for name in CERTIFICATES if name in os.environ)}:
        if Path(path).is_file():
            target = system.root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return system


def fetch(system: System, wheels: list[Path], packages: list[Path], requirements: list[str]) -> float:
    """Puts the wheel and all that it requires into the system's folder /packages; the seconds that pip took."""
    target = system.root / "packages"
    target.mkdir()
    for wheel in wheels:
        shutil.copy(wheel, target)
    for n, folder in enumerate(packages):
        shutil.copytree(folder, system.root / f"more/{n}")
    links = [f"--find-links={path}" for path in ("/packages", *(f"/more/{n}" for n in range(len(packages))))]
    system.run("python3", "-m", "venv", "/venv")
    step = system.run(*PIP, "download", "--only-binary=:all:", "--dest=/packages", *links, "specserve", *requirements)
    shutil.rmtree(system.root / "more", ignore_errors=True)
    return step.seconds


def install(system: System, with_uv: bool, requirements: list[str]) -> float:
    """Installs what was fetched into /venv; the seconds that it took, for uv with all unpacked in its cache."""
    options = ("install", "--no-index", "--find-links=/packages")
    if not with_uv:
        return system.run(*PIP, *options, *requirements).seconds
    system.run(*PIP, "install", "--target=/uv", "uv")
    system.run("python3", "-m", "venv", "/other")
    uv = ("/uv/bin/uv", "pip", *options, "--quiet", "--python")
    system.run(*uv, "/other/bin/python", *requirements)
    return system.run(*uv, "/venv/bin/python", *requirements).seconds


def use(system: System, model: str) -> None:
    """Answers, the list and the removal, with their times."""
    prompt = ("run", model, "What is the capital of France?", "--max-tokens", "32", "--temperature", "0")
    began = system.run("specserve", *prompt)
    if not began.output.strip():
        fail(f"{system.root.name}: there is no answer")
    print(f"  run, the model is fetched: {began.first_s:6.1f} s to the first token, {began.seconds:.1f} s in all")
    again = system.run("specserve", *prompt)
    if again.output != began.output:
        fail(f"{system.root.name}: two answers\n{began.output}{again.output}")
    print(f"  run, the model is here:    {again.first_s:6.1f} s to the first token, {again.seconds:.1f} s in all")
    print(f"  models:                    {system.megabytes(MODELS):6.0f} MB")
    if model not in system.run("specserve", "list").output:
        fail(f"{system.root.name}: list does not name {model}")
    system.run("specserve", "rm", "--yes", model)
    if model in system.run("specserve", "list").output:
        fail(f"{system.root.name}: {model} is still in the list")
    print(f"  models after rm:           {system.megabytes(MODELS):6.0f} MB")


def try_in(system: System, arguments: argparse.Namespace) -> None:
    wheels = sorted(arguments.wheels.glob("specserve-*.whl"))
    fetched = fetch(system, wheels, arguments.packages, arguments.require)
    installed = install(system, arguments.uv, ["specserve", *arguments.require])
    shutil.rmtree(system.root / "packages")
    about = system.run("sh", "-c", ". /etc/os-release; echo $PRETTY_NAME; python3 --version; ldd --version | head -1")
    print(f"{system.root.name}: {', '.join(about.output.splitlines())}")
    kernels = "import specserve.kernels._native as n; print(n.__file__.rpartition('/')[2], *n.instruction_sets())"
    print(f"  kernels:                   {system.run('/venv/bin/python', '-c', kernels).output.strip()}")
    print(f"  pip download:              {fetched:6.1f} s")
    print(f"  {'uv ' if arguments.uv else ''}pip install, all is here: {installed:6.1f} s")
    print(f"  environment:               {system.megabytes('/venv'):6.0f} MB", flush=True)
    use(system, arguments.model)


def check_tools(wheels: Path) -> None:
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing:
        sys.exit(f"{', '.join(missing)} is not installed: apt-get install debootstrap util-linux mount coreutils")
    if os.geteuid() != 0:
        sys.exit("Making a bare system needs root: sudo .venv/bin/python tests/wheel/bare_systems.py ...")
    if not any(wheels.glob("specserve-*.whl")):
        sys.exit(f"There is no wheel in {wheels}: make wheel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="+", metavar="RELEASE")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="folder with the wheel")
    parser.add_argument("--packages", type=Path, action="append", default=[], help="more wheels for pip to choose from")
    parser.add_argument("--require", action="append", default=[], help='one more requirement, such as "torch==2.13.*"')
    parser.add_argument("--components", default="main", help="of the release's archive: Ubuntu needs main,universe")
    parser.add_argument("--uv", action="store_true", help="install with uv, out of its cache, in place of pip")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--folder", type=Path, help="where the systems are made (default: a temporary folder)")
    arguments = parser.parse_args()
    check_tools(arguments.wheels)
    for release in arguments.releases:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="specserve-bare-") as folder:
            try_in(make(release, arguments.components, Path(folder)), arguments)


if __name__ == "__main__":
    main()
