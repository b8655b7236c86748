# SPDX-License-Identifier: Apache-2.0
"""Make a release: check the tree and the changelog, build the wheels, try them, and set the tag.

    python scripts/release.py VERSION [--out dist] [--no-tag] [--aarch64-python PYTHON]

The wheel of this machine's architecture is installed in an empty virtual environment, beside the torch of this Python,
and runs examples/quickstart.py there. The one for aarch64 does so with PYTHON: an aarch64 interpreter that has torch and
that this machine can run (scripts/debian_root.py makes one, in emulation). Without it nothing is tagged. The wheels
are built twice, in two folders, and have to be equal bit for bit.
Nothing is pushed and nothing is uploaded: the last lines say how.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from debian import call

ROOT = Path(__file__).resolve().parents[1]


def tree_faults(root: Path, version: str) -> list[str]:
    """Return what keeps this tree from being that version."""
    found = []
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return [f"version {version!r}, wanted MAJOR.MINOR.PATCH"]
    git = ["git", "-C", str(root)]
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    if changed:
        found.append(f"the tree is not clean: {len(changed.splitlines())} files, the first is {changed.split()[1]}")
    header = (root / "csrc/bind/version.h").read_text(encoding="utf-8")
    if f'#define ZPP_VERSION "{version}"' not in header:
        found.append(f"csrc/bind/version.h has another version, wanted {version}")
    heading = re.search(r"^## (.*)$", (root / "docs/CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if not heading or not re.fullmatch(rf"{re.escape(version)}( \(\d{{4}}-\d\d-\d\d\))?", heading[1]):
        seen = heading[1] if heading else "nothing"
        found.append(f'docs/CHANGELOG.md begins with "{seen}", wanted "{version}" and perhaps a date')
    if (
        subprocess.run([*git, "rev-parse", "-q", "--verify", f"refs/tags/v{version}"], capture_output=True).returncode
        == 0
    ):
        found.append(f"the tag v{version} exists")
    return found


def empty_environment(python: str, folder: Path) -> Path:
    """Make a virtual environment that has nothing but what ``python`` itself sees of torch."""
    call([python, "-m", "venv", str(folder)])
    made = folder / "bin" / "python"
    site = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    torch_at = call([python, "-c", "import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])"]).split()[-1]
    packages = Path(call([str(made), "-c", site]).split()[-1])
    (packages / "torch_of_parent.pth").write_text(torch_at + "\n", encoding="utf-8")
    return made


def try_wheel(wheel: Path, python: str, folder: Path, emulated: bool = False) -> str:
    """Install a wheel in an empty environment, run the quickstart away from this tree; return where zeropp came from.

    An environment cannot be made of an interpreter that a script starts (``emulated``): it gets the wheel unpacked.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if emulated:
        made, variables["PYTHONPATH"] = python, str(folder)
        zipfile.ZipFile(wheel).extractall(folder)
    else:
        made = str(empty_environment(python, folder))
        call([made, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel)])
    code = "import zeropp, runpy; print(zeropp.__file__); "
    code += f"runpy.run_path({str(ROOT / 'examples' / 'quickstart.py')!r}, run_name='__main__')"
    done = subprocess.run([made, "-c", code], cwd=folder, env=variables, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        sys.exit(f"{wheel.name}: the quickstart fails in an empty environment\n{done.stdout}{done.stderr}")
    origin = done.stdout.splitlines()[0]
    if not origin.startswith(str(folder)):
        sys.exit(f"{wheel.name}: zeropp was imported from {origin}, wanted the wheel in {folder}")
    return origin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--no-tag", action="store_true", help="check everything, set no tag")
    parser.add_argument("--aarch64-python", metavar="PYTHON")
    options = parser.parse_args()
    options.out = options.out.resolve()
    if faults := tree_faults(ROOT, options.version):
        sys.exit("\n".join(faults))
    print(call([sys.executable, "scripts/wheels.py", "--twice", "--out", str(options.out)]), end="")
    pythons = {"x86_64": sys.executable, "aarch64": options.aarch64_python}
    for machine, python in pythons.items():
        (wheel,) = options.out.glob(f"zeropp-{options.version}-*_{machine}.whl")
        if not python:
            print(f"{wheel.name}: not tried; --aarch64-python names an interpreter that runs it")
            continue
        with tempfile.TemporaryDirectory(prefix="zeropp-release-") as folder:
            try_wheel(wheel, python, Path(folder).resolve(), emulated=machine != platform.machine())
        print(f"{wheel.name}: runs the quickstart in an empty environment")
    if options.no_tag or not options.aarch64_python:
        print(f"v{options.version} is not tagged")
        return 0 if options.no_tag else 1
    call(["git", "tag", "-a", f"v{options.version}", "-m", f"zeropp {options.version}"])
    print(
        f"tagged v{options.version}; git push origin v{options.version}, then twine upload {options.out}/zeropp-*.whl"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
