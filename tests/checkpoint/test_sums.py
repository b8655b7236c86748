# SPDX-License-Identifier: Apache-2.0
"""The checksum of checkpoints beside zlib's, and files that are written over old ones."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from zeropp import _C
from zeropp.checkpoint.offline import verify


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 5000), st.integers(0, 40), st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_the_sum_is_zlibs(length, offset, before, seed):
    data = torch.randint(0, 256, (length + offset,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    data = data[offset:]
    wanted = zlib.crc32(data.numpy().tobytes(), before)
    copy = torch.zeros_like(data)
    assert _C.crc32(data.data_ptr(), length, before) == wanted
    assert _C.crc32_copy(copy.data_ptr(), data.data_ptr(), length, before) == wanted and torch.equal(copy, data)


def test_the_tables_give_the_same_sum():
    """The tables, which run where the CPU has no carry-less multiplication, give the same sum."""
    script = (
        "import torch, zlib; from zeropp import _C; d = torch.arange(999, dtype=torch.uint8) * 7;"
        "assert _C.cpu_level() == 'scalar'; assert _C.crc32(d.data_ptr(), 999) == zlib.crc32(d.numpy())"
    )
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "ZEROPP_CPU": "scalar"}, check=True, timeout=120)


@pytest.fixture
def trained():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    return zeropp.prepare(model, torch.optim.AdamW(model.parameters()))


def save(folder, trained, step, **options):
    model, optimizer = trained
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    done = zeropp.save(folder, model, optimizer, step=step, extra={"fill": torch.ones(3000 - 900 * step)}, **options)
    if options.get("background"):
        done.wait()
    return zeropp.full_state_dict(model)


def inode(path):
    return path.stat().st_ino


@pytest.mark.parametrize("background", [False, True])
def test_the_files_of_what_goes_are_written_over(tmp_path, trained, background):
    """By `keep` and by the same step; shorter files, too. Without `spare` nothing is left."""
    part = "rank-00000.safetensors"
    options = {"keep": 1, "spare": True, "background": background}
    save(tmp_path, trained, 0, **options)
    first = inode(tmp_path / "step-0" / part)
    save(tmp_path, trained, 1, **options)
    assert inode(tmp_path / ".spare" / part) == first and not (tmp_path / ".spare" / "manifest.json").exists()
    wanted = save(tmp_path, trained, 2, **options)
    assert inode(tmp_path / "step-2" / part) == first
    assert [one.wrong for one in verify(tmp_path)] == [None]
    zeropp.load(tmp_path, *trained)
    assert all(torch.equal(value, wanted[name]) for name, value in zeropp.full_state_dict(trained[0]).items())
    save(tmp_path, trained, 2, background=background)
    assert sorted(one.name for one in tmp_path.iterdir() if one.name != ".writer") == ["latest", "step-2"]


def test_a_file_that_somebody_reads_is_not_written_over(tmp_path, trained):
    """Open, mapped, or under another name: it keeps its bytes."""
    part = "rank-00000.safetensors"
    for step, hold in enumerate((lambda path: path.open("rb"), torch.UntypedStorage.from_file, os.link)):
        folder = tmp_path / str(step)
        save(folder, trained, 0, keep=1, spare=True)
        path = folder / "step-0" / part
        before = path.read_bytes()
        if hold is os.link:
            os.link(path, tmp_path / "kept")
            held = (tmp_path / "kept").read_bytes
        elif step == 0:
            file = hold(path)
            held = file.read
        else:
            storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=len(before))
            held = lambda storage=storage: bytes(storage)  # noqa: E731
        save(folder, trained, 1, keep=1, spare=True)
        save(folder, trained, 2, keep=1, spare=True)
        assert held() == before
        assert [one.wrong for one in verify(folder)] == [None]
