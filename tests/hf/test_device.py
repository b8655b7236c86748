# SPDX-License-Identifier: Apache-2.0
"""Accelerate and Trainer train on the device that they chose: on the simulated GPU as plain torch does there.

Accelerate does not know the simulated GPU, so the tests put it in the place of the device that Accelerate chose.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zeropp
from ranks import on_ranks
from torch import nn

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install zeropp[hf]")
pytest.importorskip("transformers", reason="transformers is not installed: pip install zeropp[hf]")


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.last(torch.relu(self.first(inputs)))
        return {"loss": (out - labels).square().mean(), "logits": out}


def _rows(count: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randn(8, generator=draw, device="cpu") for _ in range(count)]
    return [{"inputs": row, "labels": row[:1]} for row in rows]


def _on_cpu() -> Regression:
    torch.manual_seed(1)
    with torch.device("cpu"):
        return Regression()


def _plain(steps: int, rate: float) -> dict[str, torch.Tensor]:
    model = _on_cpu().to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    rows = _rows(4 * steps)
    for step in range(steps):
        batch = {name: torch.stack([row[name] for row in rows[4 * step : 4 * step + 4]]).to("sim") for name in rows[0]}
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: one.detach().cpu() for name, one in model.named_parameters()}


def _choose_sim() -> None:
    from accelerate import PartialState

    PartialState(cpu=True).device = torch.device("sim", 0)
    torch.set_default_device("cpu")  # as in a user's script: models are built there


def _same(model: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    assert next(model.parameters()).device.type == "sim"
    for name, one in zeropp.full_state_dict(model).items():
        # Our AdamW and torch's round in another order: a few units in the last place of values below 1, over three steps.
        assert torch.allclose(one.cpu(), wanted[name], rtol=0, atol=8 * 2.0**-24), name


OFFLOAD: dict[str, Any] = {"offload": {"params": {"kind": "cpu"}, "optimizer": {"kind": "cpu"}}}


@on_ranks(1, devices=("sim",), alone=True)
@pytest.mark.parametrize("options", [{}, OFFLOAD], ids=["on the device", "offloaded"])
def test_accelerate_trains_on_its_device(options: dict[str, Any]) -> None:
    from zeropp.accelerate import ZeroppAccelerator

    wanted = _plain(3, 0.01)
    _choose_sim()
    accelerator = ZeroppAccelerator(zeropp={"stage": 3, **options}, cpu=True)
    model = _on_cpu()
    loader = torch.utils.data.DataLoader(_rows(12), batch_size=4)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        assert batch["inputs"].device.type == "sim"
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    _same(model, wanted)


@on_ranks(1, devices=("sim",), alone=True)
def test_trainer_trains_on_its_device() -> None:
    import tempfile

    import transformers
    import zeropp.hf

    wanted = _plain(3, 0.01)
    torch.set_default_device("cpu")
    arguments = zeropp.hf.TrainingArguments(
        tempfile.mkdtemp(), zeropp={"stage": 3}, use_cpu=True, max_steps=3, per_device_train_batch_size=4, report_to=[],
        learning_rate=0.01, lr_scheduler_type="constant", max_grad_norm=0.0, weight_decay=0.0, save_strategy="no",
        logging_strategy="no", disable_tqdm=True, remove_unused_columns=False, optim="adamw_torch", dataloader_pin_memory=False,
    )  # fmt: skip

    _choose_sim()
    arguments.__dict__["_setup_devices"] = torch.device("sim", 0)  # what arguments.device returns

    class InOrder(zeropp.hf.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def store_flos(self) -> None:
            """Gather nothing: gloo has no simulated GPU."""

    assert issubclass(InOrder, transformers.Trainer)
    trainer = InOrder(model=_on_cpu(), args=arguments, train_dataset=_rows(12))
    trainer.train()
    _same(trainer.model, wanted)


@on_ranks(1, devices=("sim",), alone=True)
def test_another_device_in_the_configuration_is_refused() -> None:
    from zeropp.accelerate import ZeroppAccelerator

    _choose_sim()
    accelerator = ZeroppAccelerator(zeropp={"stage": 3, "device": "cpu"}, cpu=True)
    model = _on_cpu()
    with pytest.raises(zeropp.ConfigError, match="the framework trains on sim:0; leave the device out"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
