# SPDX-License-Identifier: Apache-2.0
"""From ``pip install`` to the end of the first training step, on the CPU: zeropp's wheel against DeepSpeed's package and its JIT.

Each contender gets a fresh virtual environment that sees the installed torch and what torch needs, and nothing else. One
clock runs from the start of ``pip install NAME`` to the end of a process that imports the library, partitions a small model
and takes one AdamW step. DeepSpeed's is the one that its documentation gives for states in host memory
(``offload_optimizer``), so its CPU Adam is compiled in that process, into an empty ``TORCH_EXTENSIONS_DIR``.

Not in the time: the network, and what is alike. Wheels and source archives lie in a folder before the clock starts (this
tree's wheel is built, everything else comes by ``pip download``); the environments are made before, too. ``pip`` starts
without a cache. A second row has the same process started again, when nothing is left to compile. The losses before and after
the step must agree.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from harness import ROOT, BenchError, Need, Run, alternate, run_group, version_of

CLAIM = "from pip install to the first training step takes less time than with DeepSpeed and its JIT builds"
NEEDS = (
    Need("pip", module="pip", install="python -m ensurepip"),
    Need("setuptools, which builds our wheel", module="setuptools", install="pip install setuptools"),
    Need("a C++ compiler, for DeepSpeed's JIT", program="c++", install="apt-get install g++"),
)

PACKAGES = {"zeropp": "zeropp", "DeepSpeed": "deepspeed"}
DEEPSPEED = "0.19.8"  # where none is installed
BUILD_TOOLS = ("setuptools", "wheel")  # pip wants them for a source archive
LOSS_TOLERANCE = 1e-5  # fp32, one rank; the two Adams round in another order
SETTINGS = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}

MODEL = """
import json, sys, time
start = time.perf_counter()
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())])
inputs = torch.randn(16, 512)
settings = json.loads(sys.argv[1])
"""
STEPS = {
    "zeropp": """
import zeropp as library
optimizer = torch.optim.AdamW(model.parameters(), **settings)
model, optimizer = library.prepare(model, optimizer, library.Config(stage=2))
first = model(inputs).square().mean()
first.backward()
optimizer.step()
optimizer.zero_grad()
""",
    "DeepSpeed": """
import deepspeed as library
config = {
    "train_micro_batch_size_per_gpu": 16, "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": settings},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
model, optimizer, _, _ = library.initialize(model=model, model_parameters=model.parameters(), config=config)
first = model(inputs).square().mean()
model.backward(first)
model.step()
""",
}
END = """
took = time.perf_counter() - start
second = model(inputs).square().mean()
print("figures " + json.dumps([took, float(first.detach()), float(second.detach()), library.__file__]))
"""
#: One process without torchrun.
ALONE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def call(command: list[Any], what: str, timeout_s: float = 1800.0, **variables: str) -> str:
    """The output of a command that must succeed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return run_group([*map(str, command)], {**inherited, **variables}, timeout_s, what)


# --- what lies there before the clock starts ------------------------------------------------------------------------


def requirements(name: str) -> Iterator[Any]:
    """Yield the requirements of an installed distribution that apply here."""
    from pip._vendor.packaging.requirements import Requirement

    for text in importlib.metadata.requires(name) or []:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            yield wanted


def link_torch(folder: Path) -> list[str]:
    """Links to torch and to what it needs, as they are installed here; their names."""
    names, todo = [], ["torch"]
    while todo:
        name = todo.pop()
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # an optional backend that this torch does without
            continue
        names.append(re.sub(r"[-_.]+", "-", name).lower())
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(found.locate_file(top))).resolve())
        todo += [one.name for one in requirements(name) if one.name not in names and one.name not in todo]
    return names


def fetch(wheels: Path, there: list[str]) -> str:
    """Our wheel, DeepSpeed's archive, and what both need beyond torch. Returns DeepSpeed's version."""
    pip = [sys.executable, "-m", "pip"]
    alone = ["--quiet", "--no-deps"]
    call(
        [*pip, "wheel", *alone, "--no-build-isolation", "--no-index", "--wheel-dir", wheels, ROOT], "building our wheel"
    )
    version = version_of("deepspeed")
    version = DEEPSPEED if version == "unknown" else version.partition("+")[0]
    download = [*pip, "download", "--quiet", "--dest", wheels]
    try:
        call([*download, "--no-deps", f"deepspeed=={version}"], "pip download")
        wanted = {str(one.name) for archive in wheels.glob("*") for one in needs_of(archive)}
        wanted = {name for name in wanted if re.sub(r"[-_.]+", "-", name).lower() not in there}
        call([*download, *sorted(wanted), *BUILD_TOOLS], "pip download")
    except BenchError as error:
        raise BenchError(f"DeepSpeed {version} and what it needs cannot be had: {error}") from error
    torch_again = [path.name for path in wheels.glob("torch-*")]
    if torch_again:
        raise BenchError(f"pip fetched {torch_again[0]}, which the environments are to share; report this")
    return version


def needs_of(archive: Path) -> Iterator[Any]:
    """Yield the requirements in the metadata of a wheel or a source archive."""
    import email
    import tarfile
    import zipfile

    from pip._vendor.packaging.requirements import Requirement

    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as held:
            text = held.read(next(name for name in held.namelist() if name.endswith(".dist-info/METADATA")))
    else:
        with tarfile.open(archive) as held_tar:
            member = min(
                (one for one in held_tar.getmembers() if one.name.endswith("/PKG-INFO")), key=lambda one: len(one.name)
            )
            info = held_tar.extractfile(member)
            assert info is not None
            text = info.read()
    for line in email.message_from_bytes(text).get_all("Requires-Dist") or []:
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            yield wanted


def fresh_environment(folder: Path, links: Path) -> Path:
    """A virtual environment that sees torch; its Python."""
    call([sys.executable, "-m", "venv", "--without-pip", folder], "python -m venv")
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    (packages / "torch.pth").write_text(f"{links}\n")
    return folder / "bin" / "python"


# --- what is timed --------------------------------------------------------------------------------------------------


def train_once(name: str, python: Path, extensions: Path) -> list[Any]:
    """[seconds from the process's first line to the end of the step, loss before, loss after, where the library was found]."""
    command = [python, "-I", "-c", MODEL + STEPS[name] + END, json.dumps(SETTINGS)]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # ninja is where pip put it
    text = call(command, f"{name}'s first step", PATH=path, TORCH_EXTENSIONS_DIR=str(extensions), **ALONE)
    line = next((one for one in text.splitlines() if one.startswith("figures ")), None)
    if line is None:
        raise BenchError(f"{name}: no figures; the output ends:\n{text[-3000:]}")
    figures: list[Any] = json.loads(line.removeprefix("figures "))
    if not Path(figures[3]).is_relative_to(python.parents[1]):
        raise BenchError(f"{name} was imported from {figures[3]}, not from its own environment")
    return figures


def from_nothing(name: str, base: Path, links: Path, wheels: Path, log: Callable[[str], None]) -> dict[str, Any]:
    """A contender: a fresh environment, then the clock."""
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=base) as made:
        folder = Path(made)
        python, extensions = fresh_environment(folder / "env", links), folder / "extensions"
        extensions.mkdir()
        offline = {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
            "PIP_NO_CACHE_DIR": "1",
            "PIP_CONFIG_FILE": os.devnull,
        }
        start = time.perf_counter()
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", PACKAGES[name]]
        call(pip, f"pip install {name}", **offline)
        installed = time.perf_counter()
        log(f"{name}: {installed - start:.1f} s to install")
        figures = train_once(name, python, extensions)
        end = time.perf_counter()
        log(f"{name}: {end - installed:.1f} s more to the end of the first step")
        train_once(name, python, extensions)
        again = time.perf_counter() - end
        built = sorted(path.stem for path in extensions.rglob("*.so"))
        return {
            "total": end - start, "install": installed - start, "again": again,
            "losses": figures[1:3], "built": built,
        }  # fmt: skip


def run(bench: Run) -> None:
    with tempfile.TemporaryDirectory(prefix="zeropp-bench-") as made:
        base = Path(made)
        links, wheels = base / "torch", base / "wheels"
        links.mkdir()
        there = link_torch(links)
        bench.log(f"the environments share {', '.join(there)}")
        version = fetch(wheels, there)
        bench.log("in the folder: " + ", ".join(sorted(path.name for path in wheels.iterdir())))
        turns = {name: partial(from_nothing, name, base, links, wheels, bench.log) for name in PACKAGES}
        found = alternate(turns, rounds=1 if bench.quick else 3, warmup=0)
    ours, theirs = found["zeropp"], found["DeepSpeed"]
    for one, other in zip(ours, theirs, strict=True):
        for index, when in enumerate(("before", "after")):
            far = abs(one["losses"][index] - other["losses"][index])
            bench.check(far < LOSS_TOLERANCE, f"losses {when} the step differ by {far:.2g}, {LOSS_TOLERANCE} allowed")
        bench.check(one["losses"][1] < one["losses"][0], "the step did not lower the loss")
    bench.check(ours[0]["built"] == [], f"zeropp compiled {ours[0]['built']}")
    bench.log(f"DeepSpeed compiled {', '.join(theirs[0]['built']) or 'nothing'}")
    peer = f"DeepSpeed {version}, JIT"
    extra = {
        "ours_install_s": ours[0]["install"],
        "peer_install_s": theirs[0]["install"],
        "peer_compiled": theirs[0]["built"],
    }
    for case, key, more in (("pip install to first step", "total", extra), ("the same process again", "again", {})):
        samples = {"zeropp": [one[key] for one in ours], peer: [one[key] for one in theirs]}
        bench.compare(case, samples, ours="zeropp", peers=[peer], unit="s", extra=more)
