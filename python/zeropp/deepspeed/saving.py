# SPDX-License-Identifier: Apache-2.0
"""Saving and loading of DeepSpeed's engine: checkpoints (zeropp's own format, docs/checkpoint-format.md), and whole weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zeropp.checkpoint import offline
from zeropp.checkpoint.full_state import _keys as state_keys
from zeropp.checkpoint.full_state import export, full_state_dict, load_full_state_dict
from zeropp.checkpoint.load import load
from zeropp.checkpoint.save import save
from zeropp.comm.collective import Ranks
from zeropp.config import nearest
from zeropp.data.sampling import LaterSampler
from zeropp.deepspeed.facts import Facts, logger
from zeropp.errors import CheckpointError, ConfigError
from zeropp.files.disk import write_text
from zeropp.zero.access import gathered
from zeropp.zero.engine import engine_of

LATEST = "latest"


class Saving(Facts):
    """The part of the engine that reads and writes files. Every method here is collective unless it says otherwise."""

    lr_scheduler: Any
    global_steps: int
    micro_steps: int
    skipped_steps: int
    global_samples: int

    def _prepare_now(self) -> None:
        raise NotImplementedError  # the engine's

    def _trained(self) -> Callable[[str], bool]:
        """Return a function of a name that is True for a trained parameter."""
        module = self.module
        return {n for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}.__contains__

    def _not_frozen(self) -> Callable[[str], bool]:
        """Return a function of a name that is True for anything but a frozen parameter."""
        module = self.module
        frozen = {n for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        return lambda name: name not in frozen

    # -- whole weights -----------------------------------------------------------------------------------------------------

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Whole, on rank 0, None elsewhere. (Frameworks call it by this name.)"""
        self._prepare_now()
        only = self._trained() if exclude_frozen_parameters else None
        found = full_state_dict(self.module, rank_0_only=True, only=only)
        return found if self.global_rank == 0 else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the module's ``state_dict``; at stage 3 whole, on every rank, as copies (there it has no values)."""
        if self.zeropp_config.stage == 3:
            return self._whole_state_dict(destination, prefix, keep_vars, exclude_frozen_parameters)
        more = {} if destination is None else {"destination": destination}
        found: dict[str, Any] = self.module.state_dict(prefix=prefix, keep_vars=keep_vars, **more)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    found.pop(prefix + name, None)
        return found

    def _whole_state_dict(self, destination: Any, prefix: str, keep_vars: bool, trained_only: bool) -> dict[str, Any]:
        if keep_vars:
            raise ConfigError(
                "module_state_dict(keep_vars=True): at stage 3 a state dict holds copies; read parameters inside zeropp.gathered(parameter)"
            )
        self._prepare_now()
        whole = full_state_dict(self.module, only=self._not_frozen() if trained_only else None)
        found: dict[str, Any] = {} if destination is None else destination
        found.update({prefix + name: value for name, value in whole.items()})
        return found

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Any = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Load ``checkpoint["module"]``, whole values, into the model; the same on every rank. What is partitioned is written shard by
        shard, so ``fetch_z3_params`` and ``z3_params_to_fetch`` have nothing to do."""
        if not isinstance(checkpoint, Mapping) or "module" not in checkpoint:
            known = list(checkpoint) if isinstance(checkpoint, Mapping) else []
            raise ConfigError(
                f'load_module_state_dict: {type(checkpoint).__name__} without "module"{nearest("module", known)}; wanted '
                '{"module": state dict}'
            )
        self._prepare_now()
        values = checkpoint["module"]
        if custom_load_fn is not None:
            self._load_by(custom_load_fn, values)
            return
        if strict and allowed_missing_keys is not None:
            self._check_missing(values, list(allowed_missing_keys))
            strict = False
        load_full_state_dict(self.module, values, strict=strict)

    def _check_missing(self, values: Mapping[str, Any], allowed: list[str]) -> None:
        """Raise zeropp.CheckpointError where names are missing that are not allowed to be, or are not the model's."""
        wanted = state_keys(self.module)
        missing = [name for name in wanted if name not in values and name not in set(allowed)]
        foreign = [name for name in values if name not in wanted]
        if missing or foreign:
            raise CheckpointError(
                f"load_module_state_dict: missing {missing[:3]}, of others {foreign[:3]}; allowed to be missing are {allowed}"
            )

    def _load_by(self, function: Any, values: Mapping[str, Any]) -> None:
        """Let the caller's function copy. It sees the whole model on every rank; what it wrote on rank 0 is kept."""
        with gathered(self.module, write=True), torch.no_grad():
            function(src=values, dst=self.module)

    def save_16bit_model(
        self,
        save_dir: Any,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model for others, in the parameters' own type: safetensors under a name that ends so (in parts, with an index,
        where they are larger than 2 GiB), else what ``torch.save`` writes. False: the file says that none is wanted."""
        if self.zeropp_config.stage == 3 and not self.zero_gather_16bit_weights_on_model_save():
            logger.info(
                "%s was not saved: stage3_gather_16bit_weights_on_model_save is false", Path(save_dir) / save_filename
            )
            return False
        self._prepare_now()
        if save_filename == "model.safetensors" and not exclude_frozen_parameters:
            export(self.module, save_dir)
            return True
        if save_filename.endswith(".safetensors"):
            raise ConfigError(
                f"save_16bit_model: {save_filename!r}: safetensors are written of all parameters, as model.safetensors; give that name "
                "and leave exclude_frozen_parameters out, or a name that ends in .bin"
            )
        only = self._not_frozen() if exclude_frozen_parameters else None
        whole = full_state_dict(self.module, rank_0_only=True, only=only)
        Ranks(engine_of(self.module)).only_rank_0(lambda: _save_whole(whole, Path(save_dir) / save_filename))
        return True

    def save_fp16_model(self, *where: Any, **more: Any) -> bool:
        """Do as :meth:`save_16bit_model`."""
        return self.save_16bit_model(*where, **more)

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write ``save_dir/tag`` in zeropp's format; ``save_dir/latest`` names it.

        Args:
            exclude_frozen_parameters: parameters that are not trained are left out; a load leaves those of the model as they are.
        """
        if save_dir is None or not str(save_dir):
            raise ValueError(f"save_checkpoint: save_dir {save_dir!r} is not allowed; wanted the name of a folder")
        self._prepare_now()
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        counts = ("global_steps", "micro_steps", "global_samples", "skipped_steps")
        mine = {**{name: getattr(self, name) for name in counts}, "client": dict(client_state or {})}
        save(
            Path(save_dir) / tag, self.module, self.optimizer, step=self.global_steps, scheduler=self.lr_scheduler,
            extra=mine, keep=1, only=self._trained() if exclude_frozen_parameters else None,
        )  # fmt: skip
        if save_latest:
            Ranks(engine_of(self.module)).only_rank_0(lambda: write_text(Path(save_dir) / LATEST, f"{tag}\n"))
        return True

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Return the folder that was loaded and the client state; ``(None, {})`` with a warning where ``latest`` is not there.

        Args:
            load_module_strict: parameters that only the model or only the checkpoint has are an error; else they are passed over.
            load_optimizer_states: False: the optimizer keeps its states; its fp32 copies take the loaded values.
            load_module_only: the model's values, and nothing else.
            custom_load_fn: ``f(src=state dict, dst=module)`` copies the model's values, on every rank; rank 0's are kept. Each rank
                holds the whole model meanwhile, twice.
        """
        self._prepare_now()
        if tag is None:
            tag = Ranks(engine_of(self.module)).only_rank_0(lambda: _pointed(Path(load_dir)))
            if tag is None:
                warnings.warn(f"load_checkpoint: no file {Path(load_dir) / LATEST}; nothing was loaded", stacklevel=2)
                return None, {}
        folder = Path(load_dir) / str(tag)
        optimizer = self.optimizer if load_optimizer_states and not load_module_only else None
        scheduler = self.lr_scheduler if load_lr_scheduler_states and not load_module_only else None
        strict = load_module_strict and custom_load_fn is None
        found = load(folder, self.module, optimizer, scheduler=scheduler, strict=strict)
        if custom_load_fn is not None:
            self._load_by(custom_load_fn, offline.whole_state(folder, None))
        mine = found["extra"]
        if not load_module_only:
            self.global_steps, self.micro_steps = mine["global_steps"], mine["micro_steps"]
            self.skipped_steps = mine.get("skipped_steps", 0)
            self.global_samples = mine.get("global_samples", self.global_steps * (self.train_batch_size() or 0))
            sampler = getattr(getattr(self, "training_dataloader", None), "batch_sampler", None)
            if isinstance(sampler, LaterSampler):
                sampler.sampler.step = self.global_steps
        return str(folder), mine["client"]


def _save_whole(values: Mapping[str, torch.Tensor], path: Path) -> None:
    """Under another name first, so that a file of this name is always whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    torch.save(dict(values), new)
    new.replace(path)


def _pointed(folder: Path) -> str | None:
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
