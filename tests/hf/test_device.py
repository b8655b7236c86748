# SPDX-License-Identifier: Apache-2.0
"""Accelerate and Trainer train on the device that they chose: on the simulated GPU as plain torch does there.

Accelerate does not know the simulated GPU, so the tests put it in the place of the device that Accelerate chose.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from data_parallel import data_parallel
from ranks import of_all_ranks, on_ranks
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


STEPS, MICRO, RATE, CLIP = 3, 2, 3e-3, 0.5


def _plain_llama(make: Any, rows: Any) -> list[float]:
    """Return the loss of each step on this rank: plain torch on the device, data parallel, with accumulation and clipping."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = data_parallel(make().to("sim"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(MICRO):
            first = 2 * (ranks * (MICRO * step + micro) + rank)
            ids = torch.stack([rows[first + row]["input_ids"] for row in range(2)]).to("sim")
            waits = micro < MICRO - 1 and ranks > 1
            with model.no_sync() if waits else contextlib.nullcontext():
                loss = model(input_ids=ids, labels=ids).loss / MICRO
                loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@on_ranks(1, 2, devices=("sim",), alone=True)
def test_trainer_trains_on_its_device() -> None:
    """By the command line: losses of plain torch there, an evaluation, and a checkpoint that goes on bit for bit."""
    torch.set_default_device("cpu")  # as in a user's script: models are built there
    sys.path.insert(0, str(Path(__file__).parent))
    import transformers
    import zeropp.hf
    from models import Rows, llama

    rows = Rows(2 * 2 * STEPS * MICRO, 1)
    wanted = _plain_llama(llama, rows)
    folder = Path(of_all_ranks(tempfile.mkdtemp())[0])
    words = {
        "output_dir": folder, "zeropp": json.dumps({"stage": 3}), "max_steps": STEPS, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": MICRO, "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": CLIP,
        "weight_decay": 0.0, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": STEPS,
        "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    command = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    (arguments,) = transformers.HfArgumentParser(zeropp.hf.TrainingArguments).parse_args_into_dataclasses(command)
    _choose_sim()
    arguments.__dict__["_setup_devices"] = torch.device("sim", 0)  # what arguments.device returns

    class InOrder(zeropp.hf.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
            self.seen.append(super().training_step(*args, **options))
            return self.seen[-1]

        def losses(self) -> list[float]:
            values = [float(one) for one in self.seen]
            return [sum(values[at : at + MICRO]) for at in range(0, len(values), MICRO)]

    def trained(resume: str | None) -> Any:
        trainer = InOrder(model=llama(), args=arguments, train_dataset=rows, eval_dataset=Rows(4, 2))
        trainer.seen = []
        trainer.train(resume_from_checkpoint=resume)
        assert next(trainer.model.parameters()).device.type == "sim"
        return trainer

    through = trained(None)
    # Our AdamW, norms and sums of micro-steps round in another order, over four steps: losses of about 5.
    assert through.losses() == pytest.approx(wanted, abs=5e-6)
    assert wanted[-1] < wanted[0]
    assert any("eval_loss" in row for row in through.state.log_history)
    again = trained(str(folder / "checkpoint-2"))
    assert again.losses() == through.losses()[2:]
    ends = [zeropp.full_state_dict(one.model) for one in (through, again)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@on_ranks(1, devices=("sim",), alone=True)
def test_another_device_in_the_configuration_is_refused() -> None:
    from zeropp.accelerate import ZeroppAccelerator

    _choose_sim()
    accelerator = ZeroppAccelerator(zeropp={"stage": 3, "device": "cpu"}, cpu=True)
    model = _on_cpu()
    with pytest.raises(zeropp.ConfigError, match="the framework trains on sim:0; leave the device out"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
