# SPDX-License-Identifier: Apache-2.0
"""Test the simulated driver from outside: it has every function that zeropp calls, and processes share its memory."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
import sim_build  # noqa: E402

FIRST_DEVICE, POSIX_FILE, READ_WRITE, INVALID_VALUE = 40, 1, 3, 1
TEXT = b"written by a peer"


@pytest.fixture(scope="module")
def driver() -> ctypes.CDLL:
    return ctypes.CDLL(str(sim_build.driver()))


def test_every_row_is_there(driver: ctypes.CDLL) -> None:
    cuda = re.findall(r'^CU\(\w+,\s+"(\w+)"', (ROOT / "csrc/base/cuda_api.def").read_text(), re.MULTILINE)
    nccl = re.findall(r"^NCCL\(\w+, [^,]+, (\w+),", (ROOT / "csrc/comm/nccl/nccl_api.def").read_text(), re.MULTILINE)
    assert len(cuda) > 40 and len(nccl) > 15
    assert [name for name in (*cuda, *nccl) if not hasattr(driver, name)] == []


class Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [(name, ctypes.c_int) for name in ("type", "handle_types", "location", "device")]
    _fields_ += [("windows", ctypes.c_void_p), ("flags", ctypes.c_uint64)]


class Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [(name, ctypes.c_int) for name in ("location", "device", "flags")]


class Mapped:
    """Addresses at which one handle is mapped twice."""

    def __init__(self, driver: ctypes.CDLL, handle: ctypes.c_uint64, grain: int) -> None:
        base, access = ctypes.c_uint64(), Access(1, 0, READ_WRITE)
        size = ctypes.c_size_t(2 * grain)
        assert driver.cuMemAddressReserve(ctypes.byref(base), size, ctypes.c_size_t(0), base, ctypes.c_uint64(0)) == 0
        self.at = [base.value, base.value + grain]
        for address in self.at:
            assert driver.cuMemMap(*map(ctypes.c_uint64, (address, grain, 0)), handle, ctypes.c_uint64(0)) == 0
        assert driver.cuMemSetAccess(base, size, ctypes.byref(access), ctypes.c_size_t(1)) == 0


def enter(driver: ctypes.CDLL) -> None:
    context = ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), FIRST_DEVICE) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0


def peer(path: str, file: int, grain: int) -> None:
    """Map the memory of a file descriptor, and write to it."""
    driver, handle = ctypes.CDLL(path), ctypes.c_uint64()
    enter(driver)
    assert driver.cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(file), POSIX_FILE) == 0
    ctypes.memmove(Mapped(driver, handle, grain).at[1], TEXT, len(TEXT))


def test_memory_is_mapped_twice_and_shared_with_a_process(driver: ctypes.CDLL) -> None:
    enter(driver)
    properties, grain, handle = Properties(1, POSIX_FILE, 1, 0), ctypes.c_size_t(), ctypes.c_uint64()
    assert driver.cuMemGetAllocationGranularity(ctypes.byref(grain), ctypes.byref(properties), 0) == 0
    create = driver.cuMemCreate
    none = ctypes.c_uint64(0)
    assert (
        create(ctypes.byref(handle), ctypes.c_size_t(grain.value + 1), ctypes.byref(properties), none) == INVALID_VALUE
    )
    assert create(ctypes.byref(handle), grain, ctypes.byref(properties), none) == 0
    assert driver.cuMemMap(grain, grain, none, handle, none) == INVALID_VALUE  # addresses that were not reserved
    file, mapped = ctypes.c_int(), Mapped(driver, handle, grain.value)
    assert ctypes.string_at(mapped.at[0], 4) == b"\xff" * 4  # NaN
    assert driver.cuMemExportToShareableHandle(ctypes.byref(file), handle, POSIX_FILE, none) == 0
    code = f"import test_sim_driver as t; t.peer({str(sim_build.DRIVER)!r}, {file.value}, {grain.value})"
    command = [sys.executable, "-c", code]
    paths = {**os.environ, "PYTHONPATH": str(HERE)}
    subprocess.run(command, check=True, pass_fds=[file.value], timeout=60, env=paths)
    assert [ctypes.string_at(address, len(TEXT)) for address in mapped.at] == [TEXT, TEXT]
    assert driver.cuMemRelease(handle) == 0
    assert driver.cuMemRelease(handle) == INVALID_VALUE  # a dead handle
    assert ctypes.string_at(mapped.at[0], len(TEXT)) == TEXT  # what is mapped keeps its memory
