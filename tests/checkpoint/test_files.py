# SPDX-License-Identifier: Apache-2.0
"""The layers under a checkpoint: files of tensors with checksums, and plain data without pickle."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from zeropp.checkpoint.plain import from_plain, to_plain
from zeropp.errors import CheckpointError, TierError
from zeropp.files import disk, safefile

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(safefile, "BLOCK_BYTES", 64)  # so that small files have many


def names_in(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def write_tensors(path, tensors, metadata):
    pieces = [safefile.piece_of(name, tensor) for name, tensor in tensors.items()]
    return safefile.write_pieces(path, pieces, metadata)


def random_tensor(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype) * 3


@settings(max_examples=50, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=5),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_the_safetensors_library_reads_what_is_written(tmp_path_factory, shapes, dtype, seed):
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    tensors = {f"layer.{i}": random_tensor(shape, dtype, seed + i) for i, shape in enumerate(shapes)}
    entry = write_tensors(path, tensors, {"format": "pt"})
    with safe_open(str(path), "pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            back = file.get_tensor(name)
            assert back.dtype == tensor.dtype and torch.equal(back, tensor)
    assert entry["bytes"] == path.stat().st_size
    safefile.verify(path, entry)
    safefile.verify(path, json.loads(json.dumps(entry)))


def test_every_flipped_bit_is_found_and_its_block_named(tmp_path):
    path = tmp_path / "a.safetensors"
    entry = write_tensors(path, {"w": torch.arange(100)}, {})
    good = path.read_bytes()
    for offset in range(len(good)):
        bad = bytearray(good)
        bad[offset] ^= 1 << (offset % 8)
        path.write_bytes(bad)
        with pytest.raises(CheckpointError) as caught:
            safefile.verify(path, entry)
        first = offset // 64 * 64
        assert str(caught.value).startswith(f"{path}: damaged between offset {first} and {min(first + 64, len(good))}:")


@pytest.mark.parametrize("change", [-1, -100, 1, 64])
def test_a_file_of_another_length_is_found(tmp_path, change):
    path = tmp_path / "a.safetensors"
    entry = write_tensors(path, {"w": torch.arange(100)}, {})
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(CheckpointError, match=f"damaged from offset {min(len(data), len(data) + change)} on"):
        safefile.verify(path, entry)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: the manifest names this file, and it is missing"):
        safefile.verify(tmp_path / "gone.safetensors", {"bytes": 1, "block_bytes": 1, "crc32": [0]})


def test_no_space_left_is_a_tier_error_with_path_and_bytes():
    with pytest.raises(
        TierError, match=r"/dev/full: cannot be written: No space left on device \(\d+ bytes wanted"
    ) as caught:
        write_tensors(Path("/dev/full"), {"w": torch.zeros(10000)}, {})
    assert (
        caught.value.path == "/dev/full" and caught.value.bytes_wanted >= 40000 and caught.value.bytes_free is not None
    )


def test_bytes_that_nobody_counted_are_not_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError) as caught, disk.storage_errors(tmp_path / "file" / "folder", 0):
        (tmp_path / "file" / "folder").mkdir()
    path = tmp_path / "file" / "folder"
    assert str(caught.value) == f"{path}: cannot be written: Not a directory; choose a folder that can be written"
    assert caught.value.bytes_wanted is None and caught.value.path == str(path)
    with (
        pytest.raises(TierError, match=r"No space left on device \(\d+ bytes free\); free some space"),
        disk.storage_errors(tmp_path, 0),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("length", [1, 4096, 3 * 4096 + 5, 2 * 4096 - 1])
def test_the_end_of_a_file_leaves_its_descriptor_direct(tmp_path, length):
    """Other blocks of it may still be on their way, and would go through the page cache with it."""
    whole = torch.arange(2 * 4096 + length, dtype=torch.int64).to(torch.uint8)
    memory = mmap.mmap(-1, 5 * 4096 + 4096)
    memory[: len(whole)] = bytes(whole.numpy())
    with memoryview(memory) as view:
        descriptor = disk.disk.create(tmp_path / "file")
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        disk.disk.write(descriptor, view[2 * 4096 : 2 * 4096 + length], 2 * 4096)
        if length > 4096:
            assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT == direct
        disk.disk.write(descriptor, view[: 2 * 4096], 0)
        disk.disk.sync(descriptor)
        os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == bytes(whole.numpy())


def test_several_threads_may_find_together_that_a_direct_write_is_refused(tmp_path, monkeypatch):
    """Memory that is not aligned, as a file system with stricter rules than ours would see it."""
    values = torch.arange(64 * 4096 + 1).to(torch.uint8)[1:]
    blocks = [(memoryview(values[first : first + 4096].numpy().data), 0) for first in range(0, 64 * 4096, 4096)]
    met = threading.Barrier(safefile.THREADS, timeout=10)
    real, calls = os.pwrite, iter(range(safefile.THREADS))

    def pwrite(*args):
        if next(calls, None) is not None:
            met.wait()  # all threads have seen a descriptor that writes directly
        return real(*args)

    for index in range(3):
        path = tmp_path / str(index)
        descriptor = disk.disk.create(path)
        calls = iter(range(safefile.THREADS))
        monkeypatch.setattr(os, "pwrite", pwrite)
        safefile.write_blocks(descriptor, values.numel(), blocks)
        monkeypatch.setattr(os, "pwrite", real)
        os.close(descriptor)
        assert path.read_bytes() == values.numpy().tobytes()


def test_a_dtype_that_is_not_saved_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"'w': tensors of torch\.complex128 are not saved yet"):
        write_tensors(tmp_path / "a", {"w": torch.zeros(1, dtype=torch.complex128)}, {})


def test_a_folder_takes_the_place_of_another_in_one_step(tmp_path):
    new, final = tmp_path / "new", tmp_path / "final"
    for folder, text in ((new, "new"), (final, "old")):
        folder.mkdir()
        (folder / "file").write_text(text)
    old = disk.replace_folder(new, final)
    assert (final / "file").read_text() == "new" and (old / "file").read_text() == "old"
    assert names_in(tmp_path) == sorted(["final", old.name])


def test_a_small_file_is_replaced_whole(tmp_path):
    path = tmp_path / "latest"
    for text in ("step-1\n", "step-22\n", "x"):
        disk.write_text(path, text)
        assert path.read_text() == text and names_in(tmp_path) == ["latest"]


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text()), inner)
        | st.sets(st.integers())
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(plain_values)
def test_plain_data_comes_back_through_json_with_its_types(value):
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(to_plain(value, "extra", tensors))
    back = from_plain(json.loads(text), tensors)
    assert back == value and type(back) is type(value)


def test_tensors_and_counters_come_back():
    value = {
        "t": [torch.arange(3), {"deep": torch.ones(2)}],
        "c": Counter({3: 1, 9: 2}),
        "n": torch.zeros(()).numpy().sum(),
    }
    tensors: dict[str, torch.Tensor] = {}
    back = from_plain(json.loads(json.dumps(to_plain(value, "extra", tensors))), tensors)
    assert set(tensors) == {"/extra.t.0", "/extra.t.1.deep"}
    assert torch.equal(back["t"][0], torch.arange(3)) and torch.equal(back["t"][1]["deep"], torch.ones(2))
    assert back["c"] == value["c"] and type(back["c"]) is Counter and back["n"] == 0.0


def test_what_only_pickle_could_hold_is_refused_with_its_path():
    with pytest.raises(CheckpointError, match=r"extra\.a\.1: a function cannot be saved without pickle"):
        to_plain({"a": [1, len.__class__ and (lambda: 0)]}, "extra", {})
