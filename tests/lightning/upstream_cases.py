# SPDX-License-Identifier: Apache-2.0
"""Requirements of Lightning for its own strategies (tests_pytorch/strategies, tests_fabric/strategies), tested with zeropp's in our
own words: docs/conformance.md has the names. Run by cases.py, on two ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import zeropp
import zeropp.lightning
from lightning.fabric import Fabric
from torch import nn

INPUTS = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
QUIET: dict[str, Any] = {
    "enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu", "devices": 2, "max_epochs": 1,
}  # fmt: skip


def seeded(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))


class Model(pl.LightningModule):
    """A small module; subclasses look at one thing each."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = seeded(seed)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches() -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(INPUTS), batch_size=4)


def trainer(folder: Path, strategy: Any = "zeropp", **more: Any) -> Any:
    return pl.Trainer(strategy=strategy, default_root_dir=folder, **{**QUIET, "enable_checkpointing": False, **more})


def said(way: Callable[[], Any]) -> str:
    try:
        way()
    except (zeropp.Error, RuntimeError, KeyError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# -- Lightning's Trainer -----------------------------------------------------------------------------------------------------


def test_without_fit_and_after(folder: Path) -> dict[str, Any]:
    """ddp_test_only, ddp_fit_test, test_evaluate: evaluation before and after a fit, which leaves weights alone."""
    module = Model()
    run = trainer(folder)
    before = run.test(module, batches(), verbose=False)[0]["val_loss"]
    trainer(folder).fit(module, batches())
    held = zeropp.full_state_dict(module)
    evaluates = trainer(folder)
    after = evaluates.validate(module, batches(), verbose=False)[0]["val_loss"]
    again = evaluates.test(module, batches(), verbose=False)[0]["val_loss"]
    return {
        "before": before, "after": after, "again": again, "unchanged": same(held, zeropp.full_state_dict(module)),
        "root": str(run.strategy.root_device), "is_ddp": isinstance(run.strategy, pl.strategies.DDPStrategy),
    }  # fmt: skip


def group_in_setup(folder: Path) -> dict[str, Any]:
    """test_ddp_torch_dist_is_available_in_setup."""

    class Looks(Model):
        def setup(self, stage: str) -> None:
            self.seen.append(torch.distributed.is_initialized())

    module = Looks()
    trainer(folder, max_steps=1).fit(module, batches())
    return {"seen": module.seen}


def unused_parameters(folder: Path) -> dict[str, Any]:
    """test_find_unused_parameters: an error under DDP, allowed here; what is unused stays as it was."""

    class Unused(Model):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(16, 16)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Unused()
    before = module.extra.weight.detach().clone()
    trainer(folder).fit(module, batches())
    return {"same": torch.equal(zeropp.full_state_dict(module)["extra.weight"], before)}


def gradients_synced(folder: Path) -> dict[str, Any]:
    """test_ddp_gradients_synced: automatic and manual; every rank has the mean over both."""

    class Watches(Model):
        def __init__(self, automatic: bool) -> None:
            super().__init__()
            self.automatic_optimization = automatic

        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            if self.automatic_optimization:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            with zeropp.gathered(self, grads=True):
                self.seen.append(self.net[2].bias.grad.tolist())

    found = {}
    for automatic in (True, False):
        module = Watches(automatic)
        trainer(folder, max_steps=2).fit(module, batches())
        found[str(automatic)] = module.seen
    return found


def state_on_rank_0(folder: Path) -> dict[str, Any]:
    """test_strategy_state_dict, test_load_full_state_checkpoint_into_regular_model: whole on rank 0 by the plain names; weights load
    into a plain module under DDP."""
    module = Model()
    names = list(module.state_dict())
    run = trainer(folder)
    run.fit(module, batches())
    state, optimizer = run.strategy.lightning_module_state_dict(), run.strategy.optimizer_state(module.optimizers())
    path = run.strategy.broadcast(folder / "last.ckpt")
    run.save_checkpoint(path)
    run.strategy.barrier()
    plain = Model.load_from_checkpoint(path, seed=5)
    whole = zeropp.full_state_dict(module)
    regular = trainer(folder, "ddp").validate(plain, batches(), verbose=False)
    return {
        "names": list(state) == names if run.is_global_zero else state == {}, "optimizer": optimizer,
        "weights": same(dict(plain.state_dict()), whole), "regular": regular[0]["val_loss"],
        "ours": trainer(folder).validate(module, batches(), verbose=False)[0]["val_loss"],
    }  # fmt: skip


def standard_checkpoint(folder: Path) -> dict[str, Any]:
    """test_load_standard_checkpoint_into_distributed_model: the weights of a file of DDP, for a fit that starts anew and for a test."""
    module = Model()
    run = trainer(folder, "ddp")
    run.fit(module, batches())
    path = run.strategy.broadcast(folder / "plain.ckpt")
    run.save_checkpoint(path)
    wanted = run.validate(module, batches(), verbose=False)[0]["val_loss"]
    other = Model(seed=3)
    found = trainer(folder).validate(other, batches(), ckpt_path=path, verbose=False)[0]["val_loss"]
    refused = said(lambda: trainer(folder).fit(Model(seed=3), batches(), ckpt_path=path))
    return {"loss": [found, wanted], "refused": refused}


def init_module(folder: Path) -> dict[str, Any]:
    """test_module_init_context: ``trainer.init_module`` with and without values, in the precision asked for."""
    found = {}
    for precision in ("32-true", "bf16-true"):
        for empty in (False, True):
            run = trainer(folder, precision=precision, max_steps=1)
            with run.init_module(empty_init=empty):
                module = Model()
            made = module.net[0].weight
            row = [str(made.dtype), str(made.device)]
            if empty:
                with torch.no_grad():
                    for one in module.parameters():
                        one.fill_(0.01)
            run.fit(module, batches())
            found[f"{precision} {empty}"] = [*row, str(module.net[0].weight.dtype)]
    return found


def compiled_module(folder: Path) -> dict[str, Any]:
    """test_model_parallel_single_file_checkpoint_with_compile: ``configure_model`` compiles; the file has the plain weights."""

    class Compiles(Model):
        def configure_model(self) -> None:
            if not isinstance(self.net, torch._dynamo.OptimizedModule):
                self.net = torch.compile(self.net, backend="eager")

    plain, module = Model(), Compiles()
    trainer(folder).fit(plain, batches())
    run = trainer(folder)
    run.fit(module, batches())
    path = run.strategy.broadcast(folder / "compiled.ckpt")
    run.save_checkpoint(path)
    run.strategy.barrier()
    held = torch.load(path, weights_only=True)["state_dict"]
    whole = zeropp.full_state_dict(plain)
    held = {name.replace("_orig_mod.", ""): value for name, value in held.items()}
    return {"apart": max(float((held[k] - whole[k]).abs().max()) for k in whole), "same": held.keys() == whole.keys()}


def other_sharding(folder: Path) -> dict[str, Any]:
    """test_ddp_strategy_checkpoint_zero_redundancy_optimizer: an optimizer that splits states itself is refused by name."""

    class Splits(Model):
        def configure_optimizers(self) -> Any:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)

    return {"said": said(lambda: trainer(folder).fit(Splits(), batches()))}


def newest_weights(folder: Path) -> dict[str, Any]:
    """A delayed update ends before a validation, and with the fit: ours, no case of Lightning's."""

    class Keeps(Model):
        def validation_step(self, batch: Any, index: int) -> None:
            self.seen.append(self.net(batch[0]).square().mean().item())

    strategy = zeropp.lightning.ZeroppStrategy(stage=2, offload=zeropp.Offload(optimizer="cpu", delayed_update=0))
    keep = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    module = Keeps()
    more = {"num_sanity_val_steps": 0, "enable_checkpointing": True, "callbacks": [keep], "max_epochs": 2}
    run = trainer(folder, strategy, **more)
    run.fit(module, batches(), batches())
    run.strategy.barrier()
    expected = []
    rows = INPUTS[int(os.environ["RANK"]) :: 2].split(4)
    for epoch in range(2):
        plain = seeded()
        held = torch.load(folder / f"epoch={epoch}.ckpt", weights_only=True)["state_dict"]
        plain.load_state_dict({name.removeprefix("net."): value for name, value in held.items()})
        with torch.no_grad():
            expected += [plain(one).square().mean().item() for one in rows]
    alone = Keeps()
    last = trainer(folder, zeropp.lightning.ZeroppStrategy(stage=2, offload=strategy.zeropp_config.offload))
    last.fit(alone, batches())
    schedule = zeropp.zero.engine.engine_of(alone).schedule
    return {"seen": [module.seen, expected], "pending": schedule.pending}


# -- Fabric ------------------------------------------------------------------------------------------------------------------


def fabric(strategy: Any = "zeropp", **more: Any) -> Any:
    run = Fabric(accelerator="cpu", devices=2, strategy=strategy, **more)
    run.launch()
    return run


def one_step(run: Any, model: Any, optimizer: Any) -> None:
    run.backward(model(INPUTS[:8]).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def save_before_and_after_setup(folder: Path) -> dict[str, Any]:
    """test_ddp_save_load: a model saved before and after ``setup``, loaded before and after."""
    run, found = fabric(), {}
    folder = Path(run.broadcast(str(folder)))
    model = seeded()
    wanted = {k: v.clone() for k, v in model.state_dict().items()}
    run.save(folder / "before.ckpt", {"model": model})
    run.save(folder / "after.ckpt", {"model": run.setup(model)})
    run.barrier()
    for name in ("before", "after"):
        plain = seeded(4)
        run.load(folder / f"{name}.ckpt", {"model": plain})
        found[f"{name} into plain"] = same(dict(plain.state_dict()), wanted)
        ours = seeded(5)
        wrapped = run.setup(ours)
        run.load(folder / f"{name}.ckpt", {"model": wrapped})
        found[f"{name} into ours"] = same(zeropp.full_state_dict(ours), wanted)
    return found


def strict_and_raw(folder: Path) -> dict[str, Any]:
    """test_train_save_load, test_load_full_state_dict_into_sharded_model: keys that the file lacks; a file of weights alone."""
    run = fabric()
    folder = Path(run.broadcast(str(folder)))
    model = seeded()
    model, optimizer = run.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))
    one_step(run, model, optimizer)
    run.save(folder / "state.ckpt", {"model": model, "optimizer": optimizer, "steps": 1})
    run.barrier()
    wanted = zeropp.full_state_dict(model.module)
    missing = said(lambda: run.load(folder / "state.ckpt", {"model": model, "coconut": 11}))
    state = {"model": model, "coconut": 11}
    run.load(folder / "state.ckpt", state, strict=False)
    if run.global_rank == 0:
        torch.save(torch.load(folder / "state.ckpt", weights_only=True)["model"], folder / "raw.pt")
    run.barrier()
    one_step(run, model, optimizer)
    moved = not same(zeropp.full_state_dict(model.module), wanted)
    run.load_raw(folder / "raw.pt", model)
    wrong = said(lambda: run.load_raw(folder / "state.ckpt", model))
    return {
        "missing": missing, "coconut": state["coconut"], "moved": moved, "wrong": wrong,
        "raw": same(zeropp.full_state_dict(model.module), wanted),
    }  # fmt: skip


def filtered(folder: Path) -> dict[str, Any]:
    """test_save_filter."""
    run = fabric()
    folder = Path(run.broadcast(str(folder)))
    model = run.setup(seeded())
    run.save(folder / "some.ckpt", {"model": model}, filter={"model": lambda name, value: "bias" in name})
    run.barrier()
    held = torch.load(folder / "some.ckpt", weights_only=True)["model"]
    return {"names": sorted(held), "kinds": [type(one).__name__ for one in held.values()]}


def groups_and_places(folder: Path) -> dict[str, Any]:
    """test_setup_with_orig_params_and_multiple_param_groups, test_setup_module_move_to_device, test_module_init_context."""
    run = fabric()
    model = seeded()
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2].parameters(), "lr": 1e-6}]
    wrapped, optimizer = run.setup(model, torch.optim.Adam(groups))
    before = zeropp.full_state_dict(model)
    one_step(run, wrapped, optimizer)
    after = zeropp.full_state_dict(model)
    moved = {name: float((after[name] - before[name]).abs().max()) for name in after}
    with fabric(precision="bf16-true").init_module():
        low = nn.Linear(4, 4)
    kinds = [
        type(run.setup_module(seeded(), move_to_device=move).module[0].weight).__mro__[1].__name__
        for move in (True, False)
    ]
    return {
        "moved": moved, "rates": [one["lr"] for one in optimizer.param_groups], "device": str(wrapped.device),
        "low": str(low.weight.dtype), "kinds": kinds,
    }  # fmt: skip


def compiled_again(folder: Path) -> dict[str, Any]:
    """test_reapply_compile: Fabric would compile the whole again, over gathered and released parameters; with _reapply_compile=False it trains as compiled."""
    run = fabric()
    plain, compiled = seeded(), torch.compile(seeded(), backend="eager")
    losses = []
    for model in (plain, compiled):
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), _reapply_compile=False)
        row = []
        for _ in range(3):
            loss = model(INPUTS[:8]).square().mean()
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            row.append(loss.item())
        losses.append(row)
    return {"losses": losses}


ALL = (
    test_without_fit_and_after, group_in_setup, unused_parameters, gradients_synced, state_on_rank_0, standard_checkpoint, init_module,
    compiled_module, other_sharding, newest_weights, save_before_and_after_setup, strict_and_raw, filtered, groups_and_places,
    compiled_again,
)  # fmt: skip


def upstream(folder: Path) -> dict[str, Any]:
    """Every one of them; what one raises stands under its name."""
    found: dict[str, Any] = {}
    for one in ALL:
        try:
            found[one.__name__] = one(folder / one.__name__)
        except Exception as error:
            import traceback

            found[one.__name__] = {"error": traceback.format_exc(limit=-8), "kind": type(error).__name__}
    return found
