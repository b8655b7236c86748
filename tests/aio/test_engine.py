# SPDX-License-Identifier: Apache-2.0
"""zeropp.aio.Engine through Python: shapes and dtypes, failures as exceptions, lifetimes, Ctrl-C. The engine itself is
tested in C (tests/c/test_aio_*.c)."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zeropp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zeropp import _C
from zeropp.aio import CancelledError, Engine

BACKENDS = ["threads", *(["io_uring"] if _C.uring()[0] else [])]


@pytest.fixture(params=[*BACKENDS, "checksums"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    checksums = request.param == "checksums"
    try:
        made = Engine(depth=8, block_bytes=65536, checksums=checksums, backend="auto" if checksums else request.param)
    except zeropp.NotBuiltError as error:
        pytest.skip(str(error))
    with made:
        yield made


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7, 11), (3, 1, 70001), (0, 4)])
def test_any_tensor_comes_back(engine: Engine, tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = torch.randint(0, 2, shape).to(dtype) if dtype is torch.bool else (torch.randn(shape) * 9).to(dtype)
    for make in (torch.empty, engine.empty):
        out = make(shape, dtype=dtype)
        assert out.shape == source.shape and out.dtype is dtype
        out.copy_(source)
        engine.write(out, tmp_path / "t").wait()
        assert (tmp_path / "t").read_bytes() == source.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        out.zero_()
        engine.read(out, tmp_path / "t").wait()
        assert torch.equal(out, source)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_file_is_like_a_model_of_it(engine: Engine, tmp_path: Path, data: st.DataObject) -> None:
    """Random reads and writes, waited for only at the end of each batch, against bytes in memory."""
    path = tmp_path / "model"
    path.unlink(missing_ok=True)
    start = torch.randint(0, 256, (data.draw(st.integers(0, 400_000)),), dtype=torch.uint8)
    engine.write(start, path).wait()  # order holds for the same bytes: a read does not wait for a write behind it
    model, pending = bytearray(start.numpy().tobytes()), []
    for _ in range(data.draw(st.integers(1, 8))):
        offset, size = data.draw(st.integers(0, 300_000)), data.draw(st.integers(1, 200_000))
        if data.draw(st.booleans()) or start.numel() < offset + size:
            tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
            pending.append((engine.write(tensor, path, offset), None, None))
            model.extend(bytes(max(0, offset + size - len(model))))
            model[offset : offset + size] = tensor.numpy().tobytes()
        else:
            tensor = torch.empty(size, dtype=torch.uint8)
            pending.append((engine.read(tensor, path, offset), tensor, bytes(model[offset : offset + size])))
    for future, tensor, wanted in reversed(pending):
        future.wait()
        assert tensor is None or tensor.numpy().tobytes() == wanted
    engine.flush()
    assert path.read_bytes() == bytes(model)


def test_arena_memory_comes_back(engine: Engine) -> None:
    tensor = engine.empty((1000, 1000))
    view = tensor[3:]
    assert engine.figures()["arena_used_bytes"] == 4_001_792  # 4,000,000 rounded up to 4096
    del tensor
    gc.collect()
    assert engine.figures()["arena_used_bytes"] == 4_001_792
    del view
    assert engine.figures()["arena_used_bytes"] == 0
    bounded = Engine(arena_bytes=1 << 20)
    with pytest.raises(MemoryError, match="raise arena_bytes"):
        bounded.empty((1 << 20,))
    kept = bounded.empty((1000,))
    bounded.close()
    kept.fill_(1.0)  # tensors outlive the engine
    assert kept.sum() == 1000


def test_failures_say_what_and_where(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(zeropp.TierError, match="missing") as missing:
        engine.read(torch.empty(4), tmp_path / "missing")
    assert missing.value.errno == errno.ENOENT and missing.value.path == str(tmp_path / "missing")
    (tmp_path / "short").write_bytes(b"x" * 1000)
    with pytest.raises(zeropp.TierError, match="holds 1000 bytes, wanted 4000 at offset 100") as short:
        engine.read(torch.empty(1000), tmp_path / "short", 100).wait()
    assert (short.value.bytes_wanted, short.value.offset_bytes) == (4000, 100)
    with pytest.raises(zeropp.TierError, match="cannot open"):
        engine.write(torch.empty(1), tmp_path)  # a folder
    with pytest.raises(ValueError, match="not contiguous"):
        engine.write(torch.empty(4, 4).t(), tmp_path / "x")
    with pytest.raises(ValueError, match="offset_bytes is -1"):
        engine.write(torch.empty(4), tmp_path / "x", -1)
    with pytest.raises(ValueError, match="wanted cpu"):
        engine.write(torch.empty(4, device="meta"), tmp_path / "x")
    with pytest.raises(TypeError, match="wanted a tensor, not list"):
        engine.write([1], tmp_path / "x")  # type: ignore[arg-type]
    for move in (engine.write, engine.read):
        with pytest.raises(ValueError, match="priority is 'urgnet', wanted one of 'auto', 'urgent', 'background'"):
            move(torch.empty(4), tmp_path / "x", priority="urgnet")  # type: ignore[arg-type]
        for view in (torch.ones(4, dtype=torch.complex64).conj(), torch.ones(4, dtype=torch.complex64).conj().imag):
            with pytest.raises(ValueError, match="bytes are other values"):
                move(view, tmp_path / "x")
    with pytest.raises(ValueError, match="timeout is -1"):
        engine.write(torch.empty(4), tmp_path / "x").wait(-1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_checksums(backend: Any, tmp_path: Path) -> None:
    """The disk returns what was written, or an error is raised; without checksums a change is not noticed."""
    path, source, out = tmp_path / "t", torch.randn(5000), torch.empty(5000)
    for checksums in (True, False):
        with Engine(backend=backend, checksums=checksums) as engine:
            engine.write(source, path, 100).wait()
            engine.read(out, path, 100).wait()
            seen = engine.figures()
            assert seen["checked_bytes"] == (20000 if checksums else 0) and (seen["sums_bytes"] >= 40) == checksums
            with path.open("r+b") as file:
                file.seek(9000)
                byte = file.read(1)[0]
                file.seek(9000)
                file.write(bytes([byte ^ 1]))
            if checksums:
                with pytest.raises(
                    zeropp.TierError, match="does not hold what was written: 4096 bytes at offset 8192 have"
                ) as caught:
                    engine.read(out, path, 100).wait()
                assert (caught.value.path, caught.value.offset_bytes, caught.value.bytes_wanted) == (
                    str(path),
                    8192,
                    4096,
                )
                engine.forget(path)
            engine.read(out, path, 100).wait()
            assert (out != source).sum() == 1


def test_no_room(engine: Engine, tmp_path: Path) -> None:
    """A limit on the size of files, as a quota: the reservation finds out before a byte is written."""
    path = tmp_path / "huge"
    tensor = torch.zeros(1 << 20)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
        with pytest.raises(zeropp.TierError) as full:
            engine.write(tensor, path).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, old)
    assert full.value.errno == errno.EFBIG and full.value.path == str(path)


def test_lost_write_is_raised_by_flush(engine: Engine, tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        future = engine.write(torch.zeros(100_000, dtype=torch.uint8), tmp_path / "lost")
        del future
        with pytest.raises(zeropp.TierError, match="lost"):
            engine.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, old)
    engine.flush()


def test_dropped_futures_keep_their_tensors(engine: Engine, tmp_path: Path) -> None:
    for index in range(50):
        engine.write(torch.full((30_000,), float(index)), tmp_path / "dropped", index * 120_000)
    engine.flush(durable=True)
    whole = torch.empty(50, 30_000)
    engine.read(whole, tmp_path / "dropped").wait()
    assert torch.equal(whole, torch.arange(50.0).unsqueeze(1).expand(50, 30_000))


def test_reading_counts_as_a_change(engine: Engine, tmp_path: Path) -> None:
    weight = torch.randn(1000, requires_grad=True)
    value = torch.ones(1000)
    engine.write(value, tmp_path / "v").wait()
    product = (weight * value).sum()
    engine.read(value, tmp_path / "v").wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_stripes(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    source = torch.randn(1_000_003)
    with Engine(paths=folders, stripe_bytes=65536) as engine:
        engine.write(source, "s").wait()
        back = torch.empty_like(source)
        engine.read(back, "s").wait()
        assert torch.equal(back, source)
    sizes = [(folder / "s").stat().st_size for folder in folders]
    assert sum(sizes) == source.numel() * 4 and abs(sizes[0] - sizes[1]) <= 65536
    (tmp_path / "link").symlink_to(folders[0])
    with Engine(paths=[folders[0], tmp_path / "link"]) as engine:
        with pytest.raises(ValueError, match=r'a/s" and ".*link/s" are one file, wanted a folder of its own'):
            engine.read(back, "s").wait()
        engine.write(source, tmp_path / "whole").wait()


def test_closing(tmp_path: Path) -> None:
    engine = Engine()
    future = engine.write(torch.ones(1000), tmp_path / "c")
    engine.close()
    engine.close()
    future.wait()
    assert (tmp_path / "c").stat().st_size == 4000
    with pytest.raises(zeropp.Error, match="closed"):
        engine.write(torch.ones(1), tmp_path / "c")
    with pytest.raises(KeyError), Engine(depth=1, block_bytes=4096, backend="threads") as broken:
        futures = [broken.write(torch.ones(1 << 20), tmp_path / "d", index << 22) for index in range(4)]
        raise KeyError  # what has not begun is cancelled
    with pytest.raises(CancelledError, match="cancelled"):
        futures[-1].wait()


def test_an_engine_that_is_dropped_ends_what_it_began(tmp_path: Path) -> None:
    """At the end of a program, too."""
    script = """
import sys, torch
from pathlib import Path
from zeropp.aio import Engine

def begin(name):
    engine = Engine(depth=1, block_bytes=4096, backend="threads", threads=1)
    for index in range(3):
        engine.write(torch.ones(1 << 20), Path(sys.argv[1], f"{name}-{index}"))
    return engine

begin("dropped")
kept = begin("kept")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    written = sorted(tmp_path.iterdir())
    assert [one.name for one in written] == [f"{name}-{index}" for name in ("dropped", "kept") for index in range(3)]
    assert all(one.read_bytes() == b"\0\0\x80?" * (1 << 20) for one in written)


def test_arguments() -> None:
    for arguments, sentence in [
        ({"depth": 0}, "depth is 0"), ({"depth": 5000}, "depth is 5000"), ({"block_bytes": 1000}, "is 1000"),
        ({"backend": "aio"}, "backend is 'aio'"), ({"arena_bytes": -1}, "arena_bytes is -1"),
        ({"backend": ["threads"]}, r"backend is \['threads'\], wanted one of 'auto', 'io_uring', 'threads'"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            Engine(**arguments)
    with pytest.raises(TypeError, match=r"depth is 1\.5"):
        Engine(depth=1.5)  # type: ignore[arg-type]
    for flag in ("direct", "sqpoll", "checksums"):
        with pytest.raises(TypeError, match=f"{flag} is 'no', wanted True or False"):
            Engine(**{flag: "no"})  # type: ignore[arg-type]


def test_many_threads(engine: Engine, tmp_path: Path) -> None:
    failures = []

    def client(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            source = torch.randn(5000 + seed, generator=generator)
            engine.write(source, tmp_path / "shared", seed * 100_001).wait()
            back = engine.empty(source.shape)
            engine.read(back, tmp_path / "shared", seed * 100_001).wait()
            if not torch.equal(back, source):
                failures.append(seed)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


@pytest.mark.skipif(not _C.uring()[0], reason="built without liburing")
def test_refused_ring_is_told_once(tmp_path: Path) -> None:
    """A seccomp filter, as in containers: io_uring_setup is answered EPERM."""
    code = f"""
import ctypes, logging, struct
libc = ctypes.CDLL(None, use_errno=True)
def op(code, jt, jf, k): return struct.pack("HBBI", code, jt, jf, k)
program = op(0x20, 0, 0, 0) + op(0x15, 0, 1, 425) + op(0x06, 0, 0, 0x00050001) + op(0x06, 0, 0, 0x7FFF0000)
buffer = ctypes.create_string_buffer(program)
class Prog(ctypes.Structure): _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
import torch, zeropp.aio
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Prog(4, ctypes.addressof(buffer))), 0, 0) == 0
lines = []
with zeropp.aio.Engine(log=lines.append) as engine:
    assert engine.backend == "threads"
    engine.write(torch.ones(9999), {str(tmp_path / "x")!r}).wait()
assert len(lines) == 1 and "seccomp" in lines[0], lines
told = []
class Handler(logging.Handler):
    def emit(self, record): told.append(record.getMessage())
logging.getLogger("zeropp.aio").addHandler(Handler())
for _ in range(2):
    with zeropp.aio.Engine() as engine:
        assert engine.backend == "threads"
model = torch.nn.Linear(8, 8)
offload = zeropp.Offload(params="nvme", optimizer="nvme", grads="nvme", activations="nvme", path={str(tmp_path)!r})
model, adam = zeropp.prepare(model, torch.optim.AdamW(model.parameters()), zeropp.Config(stage=3, offload=offload))
assert told == lines, told
try:
    zeropp.aio.Engine(backend="io_uring")
except zeropp.NotBuiltError as error:
    assert "seccomp" in str(error)
else:
    raise AssertionError
"""
    if os.uname().machine not in ("x86_64", "aarch64"):
        pytest.skip("system call numbers are known for x86_64 and aarch64 only")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_file_is_what_the_disk_calls_one(engine: Engine, tmp_path: Path) -> None:
    """Requests keep their order, and checksums their file, however it is spelled, linked, renamed or opened."""
    path, spelled = tmp_path / "t", f"{tmp_path}/./t"
    size = 4 << 20
    np.full(size, 1.0, np.float32).tofile(path)
    (tmp_path / "link").symlink_to(path)
    out = torch.empty(size)
    read = engine.read(out, path)  # opens it for reading only
    engine.write(torch.full((size,), 2.0), path)
    read.wait()
    assert (out == 1).all()
    for value, to, at in ((3.0, spelled, path), (4.0, tmp_path / "link", spelled), (5.0, path, tmp_path / "link")):
        engine.write(torch.full((size,), value), to, priority="background")
        engine.read(out, at, priority="urgent").wait()
        assert (out == value).all()
    engine.write(torch.full((size,), 6.0), path)
    engine.forget(path)
    engine.read(out, path).wait()
    assert (out == 6).all()
    engine.write(torch.full((size,), 7.0), tmp_path / "new").wait()
    (tmp_path / "new").replace(path)
    engine.read(out, path).wait()
    assert (out == 7).all()


def test_pipes_are_refused(engine: Engine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for move in (engine.read, engine.write):
        with pytest.raises(zeropp.TierError, match="Illegal seek"):
            move(torch.zeros(4), tmp_path / "pipe")
