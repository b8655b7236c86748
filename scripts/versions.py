# SPDX-License-Identifier: Apache-2.0
"""Try a wheel with versions of Python and torch: each in an environment of its own, without compiler and network.

    python scripts/versions.py WHEEL PYTHON:TORCH ... [--links FOLDER] [--tests WORDS]

A row such as ``python3.12:2.14.1`` names an interpreter and a version of torch; ``python3.12:none`` has no torch, and has
to say so. torch and what the tests need are downloaded by pip. Then the network and the PATH are taken away: the wheel
is installed, ``zeropp env``, the quickstart on one and on two ranks, ``zeropp doctor`` and the smoke tests run. One line
of a Markdown table is printed for each row (docs/versions.md). ``FOLDER/python:here`` names an interpreter that has
torch, perhaps of another architecture (scripts/debian_root.py): the wheel is unpacked into a folder beside it.

torch's wheels on PyPI want CUDA's libraries, which take gigabytes. ``--links`` names a folder, made once with
``pip install --target``, whose packages are linked into every environment; torch then comes without its requirements.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from debian import call

ROOT = Path(__file__).resolve().parents[1]
PURE = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")  # torch imports these
NEEDED = ("safetensors", "tqdm", "rich", "numpy", "pytest>=8", "pytest-timeout", "hypothesis")
SMOKE = (  # none of these needs transformers, the sources or a compiler
    "--quick", "tests/ops", "--ignore=tests/ops/test_cuda_images.py", "tests/comm/test_process_group.py",
    "tests/checkpoint/test_content.py", "tests/checkpoint/test_writer.py",
    *(f"tests/zero/test_{name}.py" for name in ("stages", "bf16", "fp16", "reads", "unfreeze", "onebit")),
)  # fmt: skip
NO_TORCH = "zeropp needs torch >= 2.11, and there is none: pip install torch"


class RowError(Exception):
    """A row does not do what it should; the message is its output."""


def offline() -> list[str]:
    """Return the words that run a command without a network, but for this host's own addresses; none where not allowed."""
    words = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "offline"]
    tried = shutil.which("unshare") and subprocess.run([*words, "true"], capture_output=True).returncode == 0
    return words if tried else []


class Environment:
    """A virtual environment, and commands in it without compiler and network."""

    def __init__(self, python: str, folder: Path, links: Path | None) -> None:
        call([python, "-m", "venv", "--without-pip", str(folder)])
        self.folder, self.python = folder, str(folder / "bin" / "python")
        code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        self.packages = Path(call([self.python, "-c", code]).split()[-1])
        for package in sorted(links.iterdir()) if links else []:
            (self.packages / package.name).symlink_to(package.resolve())
        self.variables = {"PATH": str(self.folder / "bin")}
        self.offline = offline()

    def install(self, *words: str) -> None:
        """Install by this script's pip: the environment has none."""
        call([sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", *words])

    def run(self, *words: str, cwd: Path) -> str:
        """Run this environment's Python, and return what it says."""
        variables = {"HOME": str(self.folder), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8", **self.variables}
        done = subprocess.run(
            [*self.offline, "env", "-i", *(f"{name}={value}" for name, value in variables.items()), self.python, *words],
            cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3600,
        )  # fmt: skip
        if done.returncode:
            raise RowError(f"{shlex.join(words)}: exit status {done.returncode}\n{done.stdout[-4000:]}")
        return done.stdout

    def tests(self, words: list[str]) -> str:
        """Run tests of this tree against the installed wheel, and return pytest's last line."""
        copy = self.folder / "tree"  # tests/conftest.py looks for the module beside the tests
        shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        shutil.copytree(ROOT / "examples", copy / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "python").symlink_to(self.packages)
        said = self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *words, cwd=copy)
        return said.strip().splitlines()[-1].strip("= ")


class Here(Environment):
    """An interpreter that has torch itself, and a folder that it imports zeropp from."""

    def __init__(self, python: str, folder: Path, wheel: Path) -> None:
        self.folder, self.python, self.packages = folder, str(Path(python).resolve()), folder / "site"
        zipfile.ZipFile(wheel).extractall(self.packages)
        self.variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(self.packages)}
        self.offline = offline()


def without_torch(environment: Environment) -> list[str]:
    """Return the cells of a row without torch: importing has to say what to install."""
    try:
        environment.run("-c", "import zeropp", cwd=environment.folder)
    except RowError as refused:
        if NO_TORCH in str(refused):
            return ["none", "the sentence about torch", "", ""]
        raise
    raise RowError("import zeropp works where there should be no torch")


def with_torch(environment: Environment, tests: list[str]) -> list[str]:
    """Return the cells of a row with torch."""
    here = environment.folder
    found = json.loads(environment.run("-m", "zeropp", "env", "--json", cwd=here))
    if not found["module"].startswith(str(environment.packages)):
        raise RowError(f"zeropp is imported from {found['module']}, wanted {environment.packages}")
    script = str(ROOT / "examples" / "quickstart.py")
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    for words in ((script,), (*ranks, script)):
        if "loss " not in environment.run(*words, cwd=here):
            raise RowError(f"{shlex.join(words)} printed no loss")
    environment.run(*ranks, "-m", "zeropp", "doctor", "--factor", "1000", cwd=here)  # does it run, however busy this is
    return [found["torch"], "env, quickstart, doctor", environment.tests(tests), found["cpu"]["level"]]


def row(wheel: Path, python: str, torch: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """Make the environment of a row, and return the row's cells."""
    if torch == "here":
        here = Here(python, folder, wheel)
        return [here.run("-c", "import platform; print(platform.python_version())", cwd=folder).split()[-1],
                *with_torch(here, options.tests)]  # fmt: skip
    environment = Environment(python, folder, options.links)
    if torch != "none":
        light = ["--no-deps"] if options.links else []
        environment.install(*light, f"torch=={torch}")
        environment.install(*NEEDED, *(PURE if options.links else ()))
    environment.install("--no-index", "--no-deps", str(wheel))
    cells = without_torch(environment) if torch == "none" else with_torch(environment, options.tests)
    version = call([python, "-c", "import platform; print(platform.python_version())"]).split()[-1]
    return [version, *cells]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("rows", nargs="+", metavar="PYTHON:TORCH")
    parser.add_argument("--links", type=Path, metavar="FOLDER", help="packages that every environment sees")
    parser.add_argument("--tests", type=shlex.split, default=list(SMOKE), help="words for pytest; default: smoke tests")
    options = parser.parse_args()
    status = 0
    print("| Python | torch | run | tests | kernels | s |\n|---|---|---|---|---|---|", flush=True)
    for name in options.rows:
        python, _, torch = name.rpartition(":")
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="zeropp-versions-") as folder:
            try:
                cells = row(options.wheel.resolve(), python, torch, options, Path(folder).resolve())
            except RowError as error:
                print(f"{name}: {error}", file=sys.stderr)
                status, cells = 1, [python, torch, "FAILED", "", ""]
        print(f"| {' | '.join(cells)} | {time.monotonic() - started:.0f} |", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
