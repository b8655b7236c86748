# SPDX-License-Identifier: Apache-2.0
"""Cases of test_lightning.py on each rank: every case runs under DDP and under zeropp, in one process. Run under
torchrun: cases.py FOLDER CASE..."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import zeropp
import zeropp.lightning
from torch import nn
from upstream_cases import upstream

DRAW = torch.Generator().manual_seed(1)
INPUTS = torch.randn(64, 16, generator=DRAW)
DATA = torch.utils.data.TensorDataset(INPUTS, INPUTS[:, :1] * 2 + INPUTS[:, 1:2].square())
QUIET = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "accelerator": "cpu",
    "devices": 2,
}


def batches() -> Any:
    return torch.utils.data.DataLoader(DATA, batch_size=8)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def make_module(base: Any, *, late: bool = False, manual: bool = False) -> Any:
    class Model(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.losses: list[float] = []
            self.seen: list[float] = []
            self.shift = nn.Parameter(torch.zeros(1))  # used by the step itself, outside of any module
            if not late:
                self.net = network()

        def configure_model(self) -> None:
            if late and not hasattr(self, "net"):
                self.net = network()

        def loss(self, batch: Any) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(batch[0]) + self.shift, batch[1])

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1]) if manual else self.loss(batch)
            self.losses.append(loss.item())
            if manual:
                optimizer = self.optimizers()
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            else:
                self.log("train_loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.seen.append(self.loss(batch).item())
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)]

    return Model()


def at_random(late: Any) -> None:
    """configure_model of a rank with another seed than rank 0, whose values count."""
    plain, seed = torch.manual_seed, torch.seed
    torch.manual_seed = lambda _: seed()  # type: ignore[assignment]
    try:
        type(late).configure_model(late)
    finally:
        torch.manual_seed = plain


def trainer(folder: Path, strategy: Any, epochs: int, package: Any = pl, **more: Any) -> Any:
    keep = package.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    wanted = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "callbacks": [keep], **QUIET, **more}
    return package.Trainer(strategy=strategy, max_epochs=epochs, default_root_dir=folder, **wanted)


STRATEGIES: dict[str, Any] = {
    "zeropp_stage_1": "zeropp_stage_1",
    "zeropp_stage_2": "zeropp_stage_2",
    "zeropp": "zeropp",
    "gathers": {"stage": 3, "host_copy": "off", "units": 4096},
}


def strategy_of(name: str) -> Any:
    given: Any = STRATEGIES.get(name, name)
    if name == "disk":
        tiers = zeropp.Offload(params="nvme", optimizer="nvme", path=sys.argv[1])
        given = {"stage": 3, "offload": tiers}
    return zeropp.lightning.ZeroppStrategy(**given) if isinstance(given, dict) else given


class Measured(type(make_module(pl.LightningModule))):  # type: ignore[misc]
    """Clips by itself, and keeps norms and learning rates."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        if hasattr(optimizer, "clip_grad_norm_"):
            norm = optimizer.clip_grad_norm_(gradient_clip_val)
        else:
            norm = nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
        self.measured += [float(norm), optimizer.param_groups[0]["lr"]]


def fit(folder: Path) -> dict[str, Any]:
    """Clipping, accumulation, a schedule, validation, checkpoints: DDP against every stage and states and parameters on disk;
    and the file alone."""
    found: dict[str, Any] = {}
    for name in ("ddp", *STRATEGIES, "disk"):
        measured = make_module(pl.LightningModule)
        measured.__class__, measured.measured = Measured, []
        trainer(folder / f"{name}-measured", strategy_of(name), 1).fit(measured, batches())
        found[f"{name} measured"] = measured.measured
        module = make_module(pl.LightningModule)
        run = trainer(folder / name, strategy_of(name), 2)
        run.fit(module, batches(), batches())
        found[name] = module.losses + module.seen
        summary = pl.utilities.model_summary.ModelSummary(module)
        found[f"{name} sizes"] = [summary.total_parameters, summary.trainable_parameters, summary.param_nums]
        predicted = run.predict(module, batches())
        found[f"{name} predicted"] = [one.flatten().tolist() for one in predicted]
        torch.distributed.barrier()
        held = torch.load(folder / name / "epoch=1.ckpt", weights_only=True)["state_dict"]
        found[f"{name} shapes"] = {key: list(value.shape) for key, value in held.items()}
        plain = make_module(pl.LightningModule)
        plain.load_state_dict(held)
        with torch.no_grad():
            found[f"{name} plain"] = plain.net(INPUTS[:8]).flatten().tolist()
    return found


def resume(folder: Path) -> dict[str, Any]:
    """From epoch 0's file: equal bit for bit; the same module may be fitted again; keep=1 folder beside each file."""
    found: dict[str, Any] = {}
    for name in ("zeropp_stage_2", "gathers"):
        through = make_module(pl.LightningModule)
        trainer(folder / name, strategy_of(name), 3).fit(through, batches(), batches())
        again = make_module(pl.LightningModule)
        run = trainer(folder / f"{name}-again", strategy_of(name), 3)
        run.fit(again, batches(), batches(), ckpt_path=folder / name / "epoch=0.ckpt")
        found[name] = [list(one) for one in (through.losses, again.losses, through.seen, again.seen)]
        found[f"{name} beside"] = sorted(p.name for p in (folder / name).iterdir())
    twice = trainer(folder / "twice", "zeropp", 1)
    twice.fit(again, batches())
    found["fitted again"] = len(again.losses)
    return found


LENGTHS = [2, 2, 4, 4]


def warm_up(folder: Path) -> dict[str, Any]:
    """Sequence-length warm-up against batches cut by hand: (loss, length) of training, then of validation."""
    tokens = torch.arange(32 * 6).view(32, 6) % 11

    class Sequences(pl.LightningModule):
        def __init__(self, by_hand: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 11))
            self.by_hand, self.seen = by_hand, []

        def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(inputs).transpose(1, 2), targets)
            self.seen.append([loss.item(), inputs.shape[1]])
            return loss

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if self.by_hand:
                batch = [one[:, : LENGTHS[self.global_step]] for one in batch]
            return self.loss(*batch)

        def validation_step(self, batch: Any, index: int) -> None:
            self.loss(*batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    found: dict[str, Any] = {}
    schedule = zeropp.Growth.at({0: 2, 2: 4})
    for name in ("ddp", "zeropp"):
        module = Sequences(name == "ddp")
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens, (tokens * 3) % 11), batch_size=4)
        ours = zeropp.lightning.ZeroppStrategy(efficiency=zeropp.Efficiency(seq_length=schedule))
        trainer(folder / name, ours if name == "zeropp" else name, 2).fit(module, loader, loader)
        found[name] = module.seen
    return found


def ways(folder: Path) -> dict[str, Any]:
    """configure_model, manual optimization, bf16 autocast, the other package."""
    found: dict[str, Any] = {}
    for name in ("ddp", "gathers"):
        late = make_module(pl.LightningModule, late=True)
        if os.environ["RANK"] == "1":
            late.configure_model = lambda late=late: at_random(late)
        trainer(folder / f"late-{name}", strategy_of(name), 1).fit(late, batches())
        manual = make_module(pl.LightningModule, manual=True)
        more = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
        if name == "ddp":
            more["strategy"] = "ddp_find_unused_parameters_true"
        given = more.pop("strategy", None) or strategy_of(name)
        trainer(folder / f"manual-{name}", given, 1, **more).fit(manual, batches())
        low = make_module(pl.LightningModule)
        trainer(folder / f"low-{name}", strategy_of(name), 1, precision="bf16-mixed").fit(low, batches())
        value = make_module(pl.LightningModule)
        more = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
        trainer(folder / f"value-{name}", strategy_of(name), 1, **more).fit(value, batches())
        found[name] = {"late": late.losses, "manual": manual.losses, "low": low.losses, "value": value.losses}
    found["stops"] = stops(folder / "stops")
    pure = make_module(pl.LightningModule)
    strategy = zeropp.lightning.ZeroppStrategy(stage=2, precision="bf16")
    trainer(folder / "pure", strategy, 1).fit(pure, batches(), batches())
    found["pure"] = [pure.losses, str(pure.shift.dtype)]
    for manual in (False, True):
        half = make_module(pl.LightningModule, manual=manual)
        strategy = zeropp.lightning.ZeroppStrategy(stage=3, precision="fp16", loss_scale=1024)
        more = {"gradient_clip_val": None, "accumulate_grad_batches": 1} if manual else {}
        run = trainer(folder / f"half-{manual}", strategy, 1, **more)
        run.fit(half, batches())
        if manual:
            found["half manual"], found["manual plain"] = half.losses, found["gathers"]["manual"]
        else:
            found["half"] = [half.losses, str(half.shift.dtype), run.optimizers[0].loss_scale]
    try:
        other = importlib.import_module("pytorch_lightning")
    except ImportError:
        return found
    importlib.reload(zeropp.lightning)
    for name in ("ddp", "zeropp"):
        module = make_module(other.LightningModule)
        trainer(folder / f"other-{name}", name, 1, other).fit(module, batches())
        found[name] = {**found.get(name, {}), "other": module.losses}
    return found


def fabric(folder: Path) -> dict[str, Any]:
    """Raw Fabric: setup, backward, accumulation, clipping, save and load."""
    from lightning.fabric import Fabric

    found: dict[str, Any] = {}
    for name in ("ddp", "zeropp_stage_1", "zeropp_stage_2", "zeropp", "disk"):
        chosen: Any = name
        if name == "disk":
            tiers = zeropp.Offload(params="nvme", optimizer="nvme", path=sys.argv[1])
            chosen = zeropp.lightning.ZeroppFabricStrategy(stage=3, offload=tiers)
        run = Fabric(accelerator="cpu", devices=2, strategy=chosen)
        run.launch()

        def build() -> Any:
            model = network()
            return run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))  # noqa: B023

        def steps(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
            losses = []
            for step in range(first, last):
                for micro in range(2):
                    draw = torch.Generator().manual_seed(step * 4 + micro * 2 + run.global_rank)  # noqa: B023
                    inputs = torch.randn(8, 16, generator=draw)
                    with run.no_backward_sync(model, enabled=micro == 0):  # noqa: B023
                        loss = (model(inputs) - inputs[:, :1]).square().mean() / 2
                        run.backward(loss)  # noqa: B023
                    losses.append(loss.item())
                losses.append(float(run.clip_gradients(model, optimizer, max_norm=0.5)))  # noqa: B023
                optimizer.step()
                optimizer.zero_grad()
            return losses

        model, optimizer = build()
        found[name] = steps(model, optimizer, 0, 2)
        state = {"model": model, "optimizer": optimizer, "step": 2}
        run.save(folder / f"{name}.ckpt", state)
        found[name] += steps(model, optimizer, 2, 4)
        model, optimizer = build()
        state = {"model": model, "optimizer": optimizer, "step": 0}
        left = run.load(folder / f"{name}.ckpt", state)
        if name != "disk":  # SGD's states live in memory
            found[f"{name} value"] = by_value(run)
        if name in ("zeropp", "zeropp_stage_1"):
            half = zeropp.lightning.ZeroppFabricStrategy(stage=3 if name == "zeropp" else 1, precision="fp16")
            half_run = Fabric(accelerator="cpu", devices=2, strategy=half)
            half_run.launch()
            found[f"{name} half"] = by_value(half_run)
        found[f"{name} again"] = [state["step"], left, steps(model, optimizer, 2, 4)]
    return found


def by_value(run: Any) -> list[float]:
    """Clipping by value; fp16 where the strategy says so."""
    model = network()
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses = []
    for step in range(4):
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 2 + run.global_rank))
        loss = (model(inputs).float() - inputs[:, :1]).square().mean()
        run.backward(loss)
        losses.append(loss.item())
        run.clip_gradients(model, optimizer, clip_val=0.01)
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Pair(pl.LightningModule):
    """A generator and a discriminator, which step in turns, and a scale that neither submodule has."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 1))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("seen", torch.zeros(1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> None:
        opt_g, opt_d = self.optimizers()
        noise = torch.randn(8, 8, generator=torch.Generator().manual_seed(index * 2 + self.global_rank))
        real = self.frozen(batch[0])
        self.seen += 1
        for optimizer, wanted in ((opt_g, 1.0), (opt_d, 0.0)):
            self.toggle_optimizer(optimizer)
            fake = self.generator(noise) * self.scale
            loss = (self.discriminator(fake) - wanted).square().mean()
            if optimizer is opt_d:
                loss = loss + (self.discriminator(real) - 1.0).square().mean()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW([*self.generator.parameters(), self.scale], lr=1e-2)
        return [adam, torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9)]


def several(folder: Path) -> dict[str, Any]:
    """Two optimizers over one module: against DDP, resumed, and the file alone; Fabric with two models in one file."""
    found: dict[str, Any] = {}
    more = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    for name in ("ddp", "zeropp_stage_1", "gathers"):
        module = Pair()
        given = "ddp_find_unused_parameters_true" if name == "ddp" else strategy_of(name)
        run = trainer(folder / name, given, 2, **more)
        run.fit(module, batches())
        found[name] = module.losses
        torch.distributed.barrier()
        held = torch.load(folder / name / "epoch=1.ckpt", weights_only=True)["state_dict"]
        plain = Pair()
        plain.load_state_dict(held)
        with torch.no_grad():
            found[f"{name} plain"] = [*plain.eval().discriminator(INPUTS[:8]).flatten().tolist(), float(plain.seen)]
        if name != "ddp":
            again = Pair()
            run = trainer(folder / f"{name}-again", strategy_of(name), 2, **more)
            run.fit(again, batches(), ckpt_path=folder / name / "epoch=0.ckpt")
            found[f"{name} again"] = again.losses
            found[f"{name} beside"] = sorted(p.name for p in (folder / name / "epoch=0.ckpt.zeropp").iterdir())
    found["fabric"] = two_models(folder)
    return found


def two_models(folder: Path) -> list[list[float]]:
    from lightning.fabric import Fabric

    run = Fabric(accelerator="cpu", devices=2, strategy="zeropp")
    run.launch()

    def build() -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name in ("actor", "critic"):
            model = network()
            made[name], made[f"{name} optimizer"] = run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        return made

    def steps(state: dict[str, Any]) -> list[float]:
        losses = []
        for _ in range(2):
            for name in ("actor", "critic"):
                loss = state[name](INPUTS[:8]).square().mean()
                run.backward(loss, model=state[name])
                state[f"{name} optimizer"].step()
                state[f"{name} optimizer"].zero_grad()
                losses.append(loss.item())
        return losses

    state = build()
    steps(state)
    run.save(folder / "two.ckpt", state)
    after = steps(state)
    state = build()
    run.load(folder / "two.ckpt", state)
    return [after, steps(state)]


class Stops(type(make_module(pl.LightningModule))):  # type: ignore[misc]
    """Validates worse and worse."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", torch.tensor(float(self.current_epoch)), sync_dist=True)


def stops(folder: Path) -> list[int]:
    """EarlyStopping: all ranks end together; ModelCheckpoint keeps the best one."""
    module = make_module(pl.LightningModule)
    module.__class__ = Stops
    best = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", monitor="val_loss")
    early = pl.callbacks.EarlyStopping("val_loss", patience=2)
    run = trainer(folder, "zeropp", 9, callbacks=[best, early])
    run.fit(module, batches(), batches())
    return [run.current_epoch, early.stopped_epoch, int(best.best_model_path.endswith("epoch=0.ckpt"))]


class Unfreezes(pl.callbacks.BaseFinetuning):
    """The head first, all from the second epoch on: by Lightning's helper, or without it (it compares values, which stage 3
    has in shards)."""

    def __init__(self, helper: bool, epoch: int = 1) -> None:
        super().__init__()
        self.helper, self.epoch = helper, epoch

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[:5])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == self.epoch and self.helper:
            self.unfreeze_and_add_param_group(module.net[:5], optimizer)
        elif epoch == self.epoch:
            module.net[:5].requires_grad_(True)
            optimizer.add_param_group({"params": module.net[:5].parameters(), "lr": 1e-3})


def unfreezing(folder: Path) -> dict[str, Any]:
    """Three epochs; the last module stays frozen."""
    found = {}
    for name, strategy, callback in (
        ("zeropp_stage_2", "zeropp_stage_2", Unfreezes(True)),
        ("gathers", "gathers", Unfreezes(False)),
        ("frozen", "zeropp_stage_2", Unfreezes(True, 9)),
    ):
        module = make_module(pl.LightningModule)
        module.configure_optimizers = lambda module=module: torch.optim.AdamW(
            [p for p in module.parameters() if p.requires_grad], lr=1e-2
        )
        more = {"callbacks": [callback], "enable_checkpointing": False}
        trainer(folder / name, strategy_of(strategy), 3, **more).fit(module, batches())
        found[name] = module.losses
    return found


def refusals(folder: Path) -> dict[str, Any]:
    said: dict[str, str] = {}

    def refused(name: str, strategy: Any = "zeropp", module: Any = None, resume: Any = None, **more: Any) -> None:
        try:
            chosen = strategy() if callable(strategy) else strategy
            trainer(folder / name, chosen, 1, **more).fit(
                module or make_module(pl.LightningModule), batches(), ckpt_path=resume
            )
            said[name] = "nothing"
        except zeropp.Error as error:
            said[name] = str(error)

    class Two(type(make_module(pl.LightningModule))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD([self.shift], lr=0.1)]

    two = make_module(pl.LightningModule, manual=True)
    two.configure_optimizers = Two.configure_optimizers.__get__(two)
    refused("two", module=two, gradient_clip_val=None, accumulate_grad_batches=1)
    refused("average", callbacks=[pl.callbacks.StochasticWeightAveraging(1e-2)])
    refused("argument", lambda: zeropp.lightning.ZeroppStrategy(stge=3))
    refused("clip", lambda: zeropp.lightning.ZeroppStrategy(config={"stage": 3, "clip": 1.0}))
    trainer(folder / "ddp", "ddp", 1).fit(make_module(pl.LightningModule), batches())
    torch.distributed.barrier()
    refused("resume", resume=folder / "ddp" / "epoch=0.ckpt")
    return said


def tensors(folder: Path) -> dict[str, Any]:
    """Two ranks that share matrices and have one batch, against one model that has all of it."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    fed: list[Any] = []

    class Cut(make_module(pl.LightningModule, late=True).__class__):  # type: ignore[misc]
        def training_step(self, *args: Any) -> torch.Tensor:
            fed.append(args[0])
            return super().training_step(args[0], 0)

        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = network()
                zeropp.parallel.tensor(
                    self.net,
                    self.device_mesh["tensor_parallel"],
                    {"0": ColwiseParallel(output_layouts=Replicate()), "3": ColwiseParallel(), "5": RowwiseParallel()},
                )

    module = Cut()
    strategy = zeropp.lightning.ZeroppStrategy(stage=1, tensor_parallel_size=2)
    options = {
        **QUIET,
        "strategy": strategy,
        "default_root_dir": folder,
        "max_epochs": 1,
        "enable_checkpointing": False,
    }
    pl.Trainer(**options).fit(module, batches())
    alone = make_module(pl.LightningModule)
    [optimizer], _schedules = alone.configure_optimizers()
    losses = []
    for batch in fed:
        loss = alone.loss(batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    said: dict[str, Any] = {"zeropp": module.losses, "alone": losses}
    try:
        bad = zeropp.lightning.ZeroppStrategy(stage=1, tensor_parallel_size=3)
        pl.Trainer(**{**options, "strategy": bad}).fit(Cut(), batches())
    except zeropp.ConfigError as error:
        said["refused"] = str(error)
    return {**said, **tensors_in_fabric(folder)}


def tensors_in_fabric(folder: Path) -> dict[str, Any]:
    """The same in a loop of Fabric, saved after two steps, and gone on with by a model built anew."""
    from lightning.fabric import Fabric
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    run = Fabric(
        accelerator="cpu", devices=2, strategy=zeropp.lightning.ZeroppFabricStrategy(stage=3, tensor_parallel_size=2)
    )
    run.launch()
    mesh = run.strategy.device_mesh
    plan = {"0": ColwiseParallel(output_layouts=Replicate()), "3": ColwiseParallel(), "5": RowwiseParallel()}
    rows = run.setup_dataloaders(batches())

    def build(cut: bool) -> tuple[Any, Any]:
        with run.init_module():
            model = network()
        if cut:
            zeropp.parallel.tensor(model, mesh["tensor_parallel"], plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return run.setup(model, optimizer) if cut else (model, optimizer)

    def step(model: Any, optimizer: Any, at: int) -> list[float]:
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(at))
        loss = (model(inputs) - inputs[:, :1]).square().mean()
        if isinstance(optimizer, zeropp.zero.step.optimizer.ZeroOptimizer):
            run.backward(loss, model=model)
            norm = run.clip_gradients(model, optimizer, max_norm=0.5)
        else:
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return [loss.item(), float(norm)]

    model, optimizer = build(True)
    alone, plain = build(False)
    said: dict[str, Any] = {"in fabric": [], "fabric alone": []}
    for at in range(4):
        if at == 2:
            run.save(folder / "cut.ckpt", {"model": model, "optimizer": optimizer})
            model, optimizer = build(True)
            run.load(folder / "cut.ckpt", {"model": model, "optimizer": optimizer})
        said["in fabric"] += step(model, optimizer, at)
        said["fabric alone"] += step(alone, plain, at)
    said["sampled"] = [rows.sampler.num_replicas, rows.sampler.rank]
    return said


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tensors": tensors,
    "fit": fit, "resume": resume, "ways": ways, "fabric": fabric, "refusals": refusals, "several": several,
    "upstream": upstream, "unfreezing": unfreezing, "warm_up": warm_up,
}  # fmt: skip


def main() -> None:
    faulthandler.dump_traceback_later(int(os.environ.get("ZEROPP_TEST_LIMIT_S", "200")), exit=True)  # a hang says where
    folder = Path(sys.argv[1])
    for case in sys.argv[2:]:
        try:
            answer: Any = CASES[case](folder / case)
        except Exception:
            answer = {"error": traceback.format_exc()}
        (folder / f"{case}.{os.environ['RANK']}.json").write_text(json.dumps(answer))
        if "error" in answer:
            raise SystemExit(f"{case}: {answer['error']}")


if __name__ == "__main__":
    main()
