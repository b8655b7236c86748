# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp env [--json]``: what was found on this machine. Needs no GPU, and starts none."""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
from pathlib import Path
from typing import Any

import torch

import zeropp
from zeropp import _C
from zeropp.cli import new_table, show
from zeropp.deepspeed import names as deepspeed_names
from zeropp.errors import Error
from zeropp.zero.model.gpus import cuda_version_text, needed_driver


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``env``."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(options: argparse.Namespace) -> int:
    """Print what was found, as a table or as JSON."""
    found = collect()
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print_table(found)
    return 0


def collect() -> dict[str, Any]:
    """Return the findings: one key a row, values as JSON has them."""
    built, refused = _C.uring()
    kernels: dict[str, dict[str, Any]] = {}
    for op, level, usable in _C.kernels():  # worst first
        row = kernels.setdefault(op, {"variants": [], "in_use": None})
        row["variants"].append(level)
        row["in_use"] = level if usable else row["in_use"]
    images = [source for source, _ in _C.cuda_images()]
    return {
        "zeropp": _C.version(),
        "module": str(Path(zeropp.__file__).parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_stable_abi": torch_abi_version(Path(torch.__file__).parent / "lib"),
        "torch_cuda": torch.version.cuda,
        "cpu": {"level": _C.cpu_level(), "detected": _C.cpu_detected(), "kernels": kernels},
        "cuda_kernels": images,
        "cuda_kernels_need": needed_driver(_C.cuda_toolkit()) if images else None,
        "cuda_driver": cuda_driver(),
        "nccl": nccl_version(),
        "deepspeed": deepspeed_name(),
        "io_uring": {"built": built, "kernel": refused is None, "why_not": refused},
    }


def torch_abi_version(libraries: Path) -> str | None:
    """Version of libtorch's stable C ABI, ``"2.13.0"``; None where this torch has none."""
    try:
        function = ctypes.CDLL(str(libraries / "libtorch_cpu.so")).aoti_torch_abi_version
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_uint64
    version = function()
    return f"{version >> 56}.{version >> 48 & 0xFF}.{version >> 40 & 0xFF}"


def cuda_driver() -> dict[str, Any]:
    """CUDA version of the installed driver, or why there is none."""
    try:
        return {"version": cuda_version_text(_C.cuda_driver()), "why_not": None}
    except (Error, RuntimeError) as error:
        return {"version": None, "why_not": str(error)}


def deepspeed_name() -> str:
    """Return the meaning of ``import deepspeed`` in this process."""
    if deepspeed_names.active():
        return f"zeropp's compatibility module (answers as {deepspeed_names.VERSION})"
    real = deepspeed_names.real_package()
    if real is not None:
        return f"the real package ({real}); `python -m zeropp run` refuses beside it"
    return "nothing; in `python -m zeropp run SCRIPT`: zeropp"


def nccl_version() -> dict[str, Any]:
    """Version of the NCCL that collectives on GPUs would use: what ZEROPP_NCCL names, torch's, or what the linker finds."""
    try:
        value = _C.nccl_version()
    except Error as error:
        return {"version": None, "why_not": str(error)}
    return {"version": f"{value // 10000}.{value % 10000 // 100}.{value % 100}", "why_not": None}


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the table of a result of ``collect``: (what, what was found)."""
    cpu, uring = found["cpu"], found["io_uring"]
    level = cpu["level"] if cpu["level"] == cpu["detected"] else f"{cpu['level']} (ZEROPP_CPU; has {cpu['detected']})"
    if not uring["built"]:
        io = "not in this build: pread instead (apt-get install liburing-dev before building)"
    else:
        io = "yes" if uring["kernel"] else f"refused by the kernel ({uring['why_not']}): pread instead"
    table = [
        ("zeropp", f"{found['zeropp']}, in {found['module']}"),
        ("Python", found["python"]),
        ("torch", f"{found['torch']} (stable ABI {found['torch_stable_abi']}, CUDA {found['torch_cuda'] or 'none'})"),
        ("CPU level", level),
    ]
    for op, row in cpu["kernels"].items():
        variants = (f"{name} (in use)" if name == row["in_use"] else name for name in row["variants"])
        table.append((f"  {op}", ", ".join(variants)))
    no_kernels = "none in this build (it was made without nvcc, or has none yet)"
    table += [
        ("CUDA kernels", ", ".join(found["cuda_kernels"]) or no_kernels),
        ("CUDA driver", found["cuda_driver"]["version"] or f"none: {found['cuda_driver']['why_not']}"),
        ("NCCL", found["nccl"]["version"] or f"none: {found['nccl']['why_not']}"),
        ("io_uring", io),
        ("import deepspeed", found["deepspeed"]),
    ]
    if found["cuda_kernels_need"]:
        table.insert(-4, ("  they need", found["cuda_kernels_need"]))
    return table


def print_table(found: dict[str, Any]) -> None:
    """Print ``rows``, in two columns that fold to the terminal's width."""
    table = new_table(show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for what, text in rows(found):
        table.add_row(what, text)
    show(table)
