# SPDX-License-Identifier: Apache-2.0
"""Reading a tensor never ends the process: views of weights that a hook kept are read after the release."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_cpu_only, on_ranks
from torch import Tensor, nn
from zeropp import Offload, Tier

KEEPS: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda w: w.detach(),
    "[0]": lambda w: w[0],
    "view(-1)": lambda w: w.view(-1),
    "data": lambda w: w.data,
    "T": lambda w: w.T,
    "numpy": lambda w: w.detach().numpy(),
    "numpy of a row": lambda w: w.detach()[3].numpy(),
}
EVERY = ("stage 2", "off", "nvme")  # try every way of keeping; the other holdings try these:
SAMPLE = (1, 3, 4)  # [0], data, T; bf16 has no numpy
NAME = "1.weight"


def _config(holding: str, path: str) -> dict[str, Any]:
    files = {"offload": Offload(params=Tier("nvme", path=path))}
    return {
        "stage 1": {"stage": 1},
        "stage 2": {"stage": 2},
        "host copy": {"stage": 3},
        "off": {"stage": 3, "host_copy": "off", "prefetch": 0},
        "off, ahead": {"stage": 3, "host_copy": "off", "prefetch": 1 << 20},
        "off, bf16": {"stage": 3, "host_copy": "off", "prefetch": 0, "precision": "bf16"},
        "nvme": {"stage": 3, **files},
        "nvme, half": {"stage": 3, "offload": Offload(params=Tier("nvme", path=path, fraction=0.5))},
    }[holding]


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Yield the path of a folder for all ranks."""
    made = [tempfile.mkdtemp(prefix="strays-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    yield made[0]


def _prepared(holding: str, path: str) -> tuple[nn.Module, Any]:
    on_cpu_only("a read of released memory of a device gets what is there; ZEROPP_POISON=1 puts NaN there")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 480), nn.Linear(480, 480), nn.Linear(480, 8))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zeropp.prepare(model, adam, zeropp.Config(units=("Linear",), **_config(holding, path)))


def _pass(model: nn.Module, step: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    dtype = next(model.parameters()).dtype
    model(x.to(dtype)).float().square().mean().backward()


def _values(kept: Any) -> Tensor:
    tensor = torch.from_numpy(kept) if isinstance(kept, np.ndarray) else kept
    return tensor.detach().clone()


def _raises() -> Any:
    return pytest.raises(
        zeropp.PartitionedParameterError,
        match=rf"parameter '{NAME}' .*clone the view inside the hook.*zeropp\.gathered",
    )


def _trained(holding: str, path: str, goes: bool, hooked: bool) -> dict[str, Tensor]:
    """Train one step for each way of keeping a view, and return the parameters."""
    model, optimizer = _prepared(holding, path)
    kept: list[Any] = []
    calls = [
        optimizer.step,
        lambda: _pass(model, 99),
        lambda: zeropp.memory(model),
        lambda: zeropp.full_state_dict(model),
    ]
    for step, keep in enumerate(KEEPS.values()):
        if holding not in EVERY and step not in SAMPLE:
            continue
        with zeropp.gathered(model[1]):
            wanted = _values(keep(model[1].weight))
        handle = None
        if hooked:
            handle = model[1].register_forward_hook(lambda module, *_: kept.append(keep(module.weight)))  # noqa: B023
        _pass(model, step)
        if handle is not None:
            handle.remove()
            found = _values(kept.pop())
            gone = found.isnan()
            assert goes or not gone.any(), (holding, step)
            assert "half" in holding or gone.all() == goes, (holding, step, found)
            assert torch.equal(found[~gone], wanted[~gone]), (holding, step)
            if gone.any():
                with _raises():
                    calls[step % len(calls)]()
        optimizer.step()
        optimizer.zero_grad()
    return zeropp.full_state_dict(model)


def reads(holding: str, goes: bool) -> None:
    with _folder() as path:
        plain, hooked = (_trained(holding, path, goes, hooked) for hooked in (False, True))
        assert all(torch.equal(plain[name], hooked[name]) for name in plain)


def _kept(holding: str, path: str, keep: Callable[[Tensor], Any]) -> tuple[nn.Module, Any, Any]:
    """Return a model, its optimizer, and a view that a hook kept of a weight which is released now."""
    model, optimizer = _prepared(holding, path)
    kept: list[Any] = []
    handle = model[1].register_forward_hook(lambda module, *_: kept.append(keep(module.weight)))
    _pass(model, 0)
    handle.remove()
    return model, optimizer, kept.pop()


def others(holding: str) -> None:
    """Writes to a view, reads from several threads, system calls, faulthandler, and a forked child."""
    with _folder() as path:
        model, optimizer, kept = _kept(holding, path, lambda w: w.detach())
        faulthandler.enable()  # over our handler
        with zeropp.gathered(model):  # its release installs our handler again
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(OSError) as refused:  # the kernel raises no signal
            os.write(_pipe(), kept.numpy().data)
        assert refused.value.errno == errno.EFAULT
        zeropp.memory(model)  # no error: nothing was recorded
        kept.mul_(2.0)
        kept[5, 5] = 7.0
        assert kept[5, 5] == 7.0
        with _raises():
            zeropp.memory(model)
        with zeropp.gathered(model):
            assert all(torch.equal(p.detach(), before[name]) for name, p in model.named_parameters())
        seen: list[Any] = []
        threads = [threading.Thread(target=lambda: seen.append(bool(kept.isnan().all()))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [True] * 3
        torch.set_num_threads(2)
        assert kept.sum().isnan()  # OpenMP's
        torch.set_num_threads(1)
        with _raises():
            optimizer.step()
        _in_a_child(kept)
        optimizer.step()
        faulthandler.disable()


def _pipe() -> int:
    return os.pipe()[1]


def _in_a_child(kept: Tensor) -> None:
    """A fault that is no stray read still ends the process, and faulthandler prints its traceback once."""
    with tempfile.TemporaryFile() as told:
        child = os.fork()
        if child == 0:
            import ctypes

            assert kept[0, 0].isnan()
            faulthandler.enable(file=told)
            ctypes.string_at(8)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        text = told.read().decode()
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV, status
    assert text.count("Fatal Python error: Segmentation fault") == 1 and "_in_a_child" in text, text


@on_ranks(2)
def test_two_models() -> None:
    """A call of one model raises the error for a view of another; for a model that is gone it has no name."""
    with _folder() as path:
        first, _, kept = _kept("off", path, lambda w: w.detach())
        second, optimizer = _prepared("off", path)
        assert kept.isnan().all()
        with _raises():
            _pass(second, 0)
        _pass(second, 0)
        del first
        import gc

        gc.collect()
        assert kept.isnan().all()
        with pytest.raises(zeropp.PartitionedParameterError, match="of a model that is gone"):
            optimizer.step()
        optimizer.step()


STAY = ("stage 1", "stage 2", "host copy")
GO = ("off", "off, ahead", "off, bf16", "nvme", "nvme, half")


@on_ranks()
@pytest.mark.parametrize("holding, ranks", [(holding, 2) for holding in (*STAY, *GO)] + [("nvme", 1)])
def test_reads(holding: str) -> None:
    reads(holding, holding in GO)


@on_ranks("2 hosts")
@pytest.mark.parametrize("holding", ["host copy", "nvme"])
def test_reads_over_hosts(holding: str) -> None:
    """There, every rank gathers."""
    reads(holding, True)


@on_ranks()
@pytest.mark.parametrize("holding, ranks", [("off", 2), ("nvme", 2), ("nvme", 1)])
def test_others(holding: str) -> None:
    others(holding)
