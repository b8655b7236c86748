# SPDX-License-Identifier: Apache-2.0
"""A model on a GPU whose states, gradients or parameters are in files, or whose step is beside a pass: the bits of the same without."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import of_all_ranks, on_ranks

WIDTH, STEPS = 48, 4


def build() -> torch.nn.Module:
    """Return the model on the device; its values are drawn on the CPU, because a lazy stream draws when it runs."""
    there = torch.get_default_device()
    with torch.device("cpu"):
        torch.manual_seed(0)
        layers = (
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Tanh(),
            torch.nn.Linear(WIDTH, 2 * WIDTH),
            torch.nn.Linear(2 * WIDTH, WIDTH),
        )
        return torch.nn.Sequential(*layers).to(there)


def trained(
    offload: dict[str, Any], stage: int = 3, micro: int = 1, **options: Any
) -> tuple[list[float], dict[str, Any]]:
    """Return this rank's losses, and the parameters at the end."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    options = {"units": ("Linear",), "accumulate": micro, "prefetch": 1 << 14, **options}
    zeropp.prepare(model, optimizer, zeropp.Config(stage=stage, offload=zeropp.Offload(**offload), **options))
    losses = []
    bf16 = options.get("precision") == "bf16"
    for number in range(STEPS * micro):
        generator = torch.Generator("cpu").manual_seed(10 * number + dist.get_rank())
        x = torch.randn(4, WIDTH, generator=generator, device="cpu").to(torch.get_default_device())
        loss = model(x.bfloat16() if bf16 else x).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        if (number + 1) % micro == 0:
            optimizer.step()
            optimizer.zero_grad()
    getattr(optimizer, "flush", lambda: None)()
    return [float(one) for one in losses], {k: v.cpu() for k, v in zeropp.full_state_dict(model).items()}


def assert_same(found: tuple[list[float], dict[str, Any]], wanted: tuple[list[float], dict[str, Any]]) -> None:
    assert found[0] == wanted[0]
    assert all(torch.equal(value, wanted[1][name]) for name, value in found[1].items())


def on_host(stage: int, **more: Any) -> dict[str, Any]:
    return {"optimizer": "cpu", **({"params": "cpu"} if stage == 3 else {}), **more}


@contextlib.contextmanager
def scratch() -> Iterator[zeropp.Tier]:
    folder = of_all_ranks(tempfile.mkdtemp())[0]
    yield zeropp.Tier("nvme", path=folder)
    of_all_ranks(None)
    shutil.rmtree(folder, ignore_errors=True)


SELDOM = pytest.mark.slow


@on_ranks(1, 2, devices=("sim-lazy",))
@pytest.mark.parametrize(
    "stage, precision",
    [(3, None), (2, "bf16"), *(pytest.param(*one, marks=SELDOM) for one in ((1, None), (3, "bf16")))],
)
def test_the_step_in_the_backward(stage: int, precision: str | None) -> None:
    options = {"stage": stage, "precision": precision}
    assert_same(trained(on_host(stage), step_in_backward=True, **options), trained(on_host(stage), **options))


@on_ranks(1, 2, devices=("sim-lazy",))
@pytest.mark.parametrize("stage", [pytest.param(1, marks=SELDOM), pytest.param(2, marks=SELDOM), 3])
def test_the_delayed_update_that_is_not_delayed_yet(stage: int) -> None:
    found = trained(on_host(stage, delayed_update=STEPS + 1), stage=stage)
    assert_same(found, trained(on_host(stage), stage=stage))


@on_ranks(1, 2, devices=("sim-lazy",))
def test_the_delayed_update_has_the_bits_of_the_same_with_states_on_disk() -> None:
    with scratch() as nvme:
        found = trained(on_host(3, optimizer=nvme, grads=nvme, delayed_update=1))
        assert_same(found, trained(on_host(3, delayed_update=1)))


@on_ranks(1, 2, devices=("sim-lazy",))
@pytest.mark.parametrize("stage, micro", [(2, 1), (3, 2)])
def test_gradients_in_a_file(stage: int, micro: int) -> None:
    with scratch() as nvme:
        found = trained(on_host(stage, grads=nvme, optimizer=nvme), stage=stage, micro=micro)
    wanted = trained(on_host(stage), stage=stage, micro=micro)
    if micro == 1:
        assert_same(found, wanted)
    else:  # in a file each backward is reduced, in memory their sum is
        assert found[0] == pytest.approx(wanted[0], rel=1e-6)


@on_ranks(2, devices=("sim-lazy",))
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_gradients_in_fewer_bits(bits: str) -> None:
    found = trained(on_host(3), comm=zeropp.Comm(grads=bits))
    exact = trained(on_host(3))
    assert found[0] != exact[0] and found[0] == pytest.approx(exact[0], rel=0.1 if bits == "int8" else 0.5)
    assert all(
        one == of_all_ranks(found[1])[0][name].tolist() for name, one in ((k, v.tolist()) for k, v in found[1].items())
    )


@on_ranks(2, devices=("sim-lazy",))
@pytest.mark.parametrize("bits, options", [("int8", {}), ("int4", {"precision": "bf16", "step_in_backward": True})])
def test_parameters_in_fewer_bits(bits: str, options: dict[str, Any]) -> None:
    """The CPU rounds the shards on the host as a kernel rounds those on a GPU."""
    comm = zeropp.Comm(params=bits)
    found = trained(on_host(3), comm=comm, **options)
    assert_same(found, trained({}, comm=comm, **options))
    assert found[0] != trained(on_host(3), **options)[0]


@on_ranks(1, 2, devices=("sim-lazy", "sim"))
@pytest.mark.parametrize("fraction", [1.0, pytest.param(0.5, marks=SELDOM)])
def test_parameters_in_a_file(fraction: float) -> None:
    with scratch() as nvme:
        tier = dataclasses.replace(nvme, fraction=fraction)
        found = trained({"params": tier, "optimizer": nvme})
    assert_same(found, trained(on_host(3)))


@on_ranks(1, 2, devices=("sim-lazy",))
@pytest.mark.parametrize(
    "precision, options",
    [("bf16", {"step_in_backward": True}), (None, {"prefetch": 0}), pytest.param("bf16", {}, marks=SELDOM)],
    ids=["in the backward", "without prefetch", "bf16"],
)
def test_parameters_in_a_file_with(precision: str | None, options: dict[str, Any]) -> None:
    with scratch() as nvme:
        found = trained({"params": nvme, "optimizer": nvme, "grads": "device"}, precision=precision, **options)
    assert_same(found, trained(on_host(3), precision=precision))


@on_ranks(2, devices=("sim-lazy",))
def test_everything_in_files_and_delayed() -> None:
    with scratch() as nvme:
        found = trained({"params": nvme, "optimizer": nvme, "grads": nvme, "delayed_update": 1})
    assert_same(found, trained(on_host(3, delayed_update=1)))
