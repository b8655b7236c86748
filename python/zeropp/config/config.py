# SPDX-License-Identifier: Apache-2.0
"""``zeropp.Config``: all of zeropp's choices in one frozen, keyword-only dataclass."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeropp.config.reading import build, fields_of, not_a_config
from zeropp.config.sections import Comm, LossScale, Offload, Precision
from zeropp.config.values import (
    DTYPES,
    TORCH_DTYPES,
    finite,
    instance,
    nearest,
    not_yet,
    one_of,
    refuses_unknown,
    whole,
    wrong,
)
from zeropp.errors import ConfigError


@refuses_unknown
@dataclass(frozen=True, kw_only=True)
class Config:
    """All of zeropp's choices. `Config()` is ZeRO-3 in the model's own types."""

    stage: int = 3
    """What is partitioned over the ranks: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters (ZeRO,
    section 5)."""

    precision: str | Precision | None = None
    """None: the model's own types. "fp32", "bf16" or "fp16": parameters and computation in that type, floating inputs
    cast to it, an fp32 master copy in the optimizer. A `Precision(...)` says it by purpose. With "fp16" call
    `optimizer.backward(loss)` in place of `loss.backward()`: it scales the loss as `loss_scale` says."""

    loss_scale: LossScale | float | None = None
    """Scale of fp16's losses: a `LossScale(...)`, None for its defaults (dynamic), or a number that stays. Only with
    precision "fp16"."""

    offload: Offload = Offload()  # noqa: RUF009  frozen
    """Tier of each kind of state: `Offload(optimizer="nvme", path="/scratch")` keeps the optimizer's on disk."""

    units: str | int | tuple[type | str, ...] = "auto"
    """What is gathered together. "auto": the model's repeated blocks. Classes, or their names: each instance is a
    unit, as `units=(Block,)` or `units=("Block",)`. A whole number: modules are grouped until a unit holds about that
    many bytes of parameters."""

    ignored: str | tuple[str, ...] = ()
    """Parameters that are left alone, by name: of a parameter, of a module (all of its), or a pattern such as "*.router.*". They
    stay as they are on every rank: not partitioned, not converted, their gradients not reduced. An optimizer of their own steps
    them. Checkpoints and state dicts hold rank 0's values of them, as of buffers."""

    host_copy: str = "auto"
    """"auto": CPU ranks of one host keep one whole copy of the parameters in shared memory and gather nothing. "off":
    each rank holds its shard and gathers (what several hosts and GPUs always do)."""

    prefetch: str | int = "auto"
    """Bytes of parameters gathered ahead of their use, along the order recorded the last time. 0 = none; "auto": 64
    MiB where a core is idle to copy them (ranks times threads below the number of cores), else none."""

    bucket_bytes: int = 64 << 20
    """Bytes of gradients that may wait in buckets for slower ranks before the backward waits for them; 0 = no
    bound. A backward that goes through several prepared models waits 100 ms, then goes beyond the bound."""

    comm: Comm = Comm()  # noqa: RUF009  frozen
    """Compression on the wire (ZeRO++)."""

    accumulate: int = 1
    """Micro-steps averaged into one step; `optimizer.step()` and `zero_grad()` do nothing between boundaries."""

    clip: float | None = None
    """Largest global gradient norm, applied inside `optimizer.step()`; None = no clipping. With it, calling
    `clip_grad_norm_` is an error."""

    sync_buffers: bool = True
    """True: at the start of a forward all ranks take rank 0's buffers (BatchNorm's running statistics, ...), where the forward before
    it built a graph outside of `no_sync`; what DistributedDataParallel does by `forward_sync_buffers`. One message, of all buffers'
    bytes; nothing where the model has none, or nothing in it is trained. False: after `prepare` each rank has its own. Buffers that
    change their shape are each rank's own either way."""

    custom_optimizer: bool = False
    """True: an optimizer of a class that zeropp does not know runs its own `step` over this rank's pieces, which are 1-D, at stages 1 to 3.
    Right for updates that are element-wise, and for no others. At stage 0 any optimizer is taken, and sees whole tensors."""

    step_in_backward: bool = False
    """True: each unit is stepped inside the backward, as soon as its gradients are reduced, and `optimizer.step()` only ends it. Bit
    for bit the same training; the bytes of states and parameters on NVMe move beside the computation, and a gradient lives no
    longer than until its unit's step. For what needs no norm of all gradients first: no clipping, no fp16, element-wise optimizers.
    Between a backward and `optimizer.step()` the model cannot be used. Stages 1 to 3, on one host or several. With gradients on
    NVMe for `accumulate` above 1 only: the last backward of a step keeps none there."""

    device: str | torch.device | None = None
    """Where shards and computation live; None: cuda:LOCAL_RANK where there is a GPU, else the CPU."""

    preflight: bool = False
    """Check every rank and link before training, as `python -m zeropp doctor` does; a second or so. A dead rank is an
    error that names it, a slow rank or link a warning."""

    def __post_init__(self) -> None:
        for name in ("preflight", "sync_buffers", "custom_optimizer"):
            if not isinstance(getattr(self, name), bool):
                raise wrong(f"Config.{name}", getattr(self, name), "True or False")
        if isinstance(self.stage, bool) or not isinstance(self.stage, int) or self.stage not in (0, 1, 2, 3):
            raise wrong("Config.stage", self.stage, "0, 1, 2 or 3")
        self._check_precision()
        self._check_units()
        self._check_ignored()
        one_of("Config.host_copy", self.host_copy, ("auto", "off"))
        if not isinstance(self.prefetch, str) or self.prefetch != "auto":
            if isinstance(self.prefetch, str):
                raise wrong(
                    "Config.prefetch",
                    self.prefetch,
                    f"'auto' or a number of bytes >= 0{nearest(self.prefetch, ['auto'])}",
                )
            whole("Config.prefetch", self.prefetch, 0, "bytes, or 'auto'")
        whole("Config.bucket_bytes", self.bucket_bytes, 0, "bytes")
        whole("Config.accumulate", self.accumulate, 1, "micro-steps a step")
        self._check_clip()
        self._check_device()
        self._check_offload()
        self._check_comm()
        self._check_step_in_backward()

    @property
    def dtype_name(self) -> str | None:
        """What parameters are held in: None (the model's own types), "fp32", "bf16" or "fp16"."""
        return self.precision.param if isinstance(self.precision, Precision) else self.precision

    @property
    def autocast_name(self) -> str | None:
        """What `torch.autocast` computes in: "bf16", "fp16", or None without it."""
        return self.precision.autocast if isinstance(self.precision, Precision) else None

    @property
    def scales_loss(self) -> bool:
        """Are gradients computed in fp16, whose range is too small for them as they are?"""
        return "fp16" in (self.dtype_name, self.autocast_name)

    def gradient_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Of parameters held in `dtype`: what their gradients add up and stay in, and what they travel in."""
        if dtype == torch.float64:  # where nothing is rounded; `prepare` refuses what asks for less
            return dtype, dtype
        chosen = self.precision if isinstance(self.precision, Precision) else Precision()
        travels = TORCH_DTYPES[chosen.reduce] if chosen.reduce is not None else dtype
        stays = dtype if travels == dtype and chosen.accumulate != "fp32" else torch.float32
        return stays, travels if self.comm.grads == "exact" else stays

    @property
    def master_name(self) -> str:
        """Type of the copy that the optimizer updates: "fp32", or "bf16": the parameters, where they are bf16."""
        return self.precision.master or "fp32" if isinstance(self.precision, Precision) else "fp32"

    @property
    def state_name(self) -> str:
        """Type of the optimizer's states: "fp32", "bf16" or "int8"."""
        return self.precision.state or "fp32" if isinstance(self.precision, Precision) else "fp32"

    @property
    def stored_name(self) -> str | None:
        """Type that weights are kept in for inference: "int8", "int4", or None: their own."""
        return self.precision.stored if isinstance(self.precision, Precision) else None

    def _check_precision(self) -> None:
        if self.precision is not None and not isinstance(self.precision, Precision):
            one_of("Config.precision", self.precision, DTYPES)
        self._check_loss_scale()

    def _check_loss_scale(self) -> None:
        value = self.loss_scale
        if value is None:
            return
        if not isinstance(value, LossScale):
            if not finite(value) or value <= 0:
                raise wrong(
                    "Config.loss_scale", value, "None (dynamic), a finite number above 0 (fixed), or LossScale(...)"
                )
            object.__setattr__(self, "loss_scale", LossScale(init=float(value), least=float(value), dynamic=False))
        if not self.scales_loss:
            raise wrong("Config.loss_scale", value, f"None with precision {self.dtype_name!r}: only fp16 needs a scale")

    def _check_units(self) -> None:
        units: Any = self.units
        if isinstance(units, type):
            units = (units,)
        if isinstance(units, (list, tuple, set, frozenset)):
            for one in units:
                if not isinstance(one, (type, str)):
                    raise wrong("Config.units", one, "a module class or the name of one")
                if isinstance(one, type) and not issubclass(one, torch.nn.Module):
                    raise wrong("Config.units", one, "a subclass of torch.nn.Module")
            if not units:
                raise wrong("Config.units", units, "at least one class, 'auto', or a number of bytes")
            object.__setattr__(self, "units", tuple(units))
        elif isinstance(units, str):
            if units != "auto":
                raise wrong(
                    "Config.units",
                    units,
                    f"'auto', classes such as units=({units!r},), or a number of bytes{nearest(units, ['auto'])}",
                )
        else:
            whole("Config.units", units, 1, "bytes of parameters a unit; or 'auto', or classes")

    def _check_ignored(self) -> None:
        names: Any = (self.ignored,) if isinstance(self.ignored, str) else self.ignored
        if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) and one for one in names):
            raise wrong("Config.ignored", self.ignored, "names of parameters or modules, or patterns of them")
        object.__setattr__(self, "ignored", tuple(names))

    def _check_clip(self) -> None:
        if self.clip is None:
            return
        if not finite(self.clip) or self.clip <= 0:
            raise wrong(
                "Config.clip",
                self.clip,
                "a finite number above 0 (largest global gradient norm), or None for no clipping",
            )
        object.__setattr__(self, "clip", float(self.clip))

    def _check_device(self) -> None:
        if self.device is None or isinstance(self.device, torch.device):
            return
        wanted = "a torch device such as 'cpu' or 'cuda:0', or None"
        if isinstance(self.device, bool) or not isinstance(self.device, (str, int)):
            raise wrong("Config.device", self.device, wanted)
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise wrong("Config.device", self.device, wanted) from error

    def _check_offload(self) -> None:
        instance("Config.offload", self.offload, Offload)
        for name, least in (("params", 3), ("grads", 2), ("optimizer", 1), ("activations", 0)):
            tier = getattr(self.offload, name)
            if tier.kind == "device":
                continue
            if self.stage < least:
                raise wrong(
                    f"Config.offload.{name}.kind",
                    tier.kind,
                    f"'device' at stage {self.stage}: this kind is partitioned from stage {least} on",
                )
            if tier.kind == "nvme" and name != "activations" and self.state_name != "fp32":
                raise not_yet(
                    "Precision.state",
                    self.state_name,
                    f"leave it out with offload.{name} on 'nvme': a step that streams through files takes fp32 states",
                )
            if tier.kind == "nvme" and name in ("params", "optimizer", "grads") and self.master_name != "fp32":
                raise not_yet(
                    "Precision.master",
                    self.master_name,
                    f"leave it out with offload.{name} on 'nvme': a step that streams through files updates an fp32 copy",
                )

        if self.offload.delayed_update is not None:
            self._check_delayed()
        params: Any = self.offload.params
        if self.stored_name is not None and params.kind == "device":
            raise wrong(
                "Precision.stored",
                self.stored_name,
                "None with offload.params on 'device': it is for weights on 'nvme' or 'cpu'",
            )

    def _check_delayed(self) -> None:
        path, steps, offload = "Config.offload.delayed_update", self.offload.delayed_update, self.offload
        if self.master_name != "fp32":
            raise not_yet("Precision.master", self.master_name, "leave it out with offload.delayed_update")
        if offload.optimizer.kind == "device":  # type: ignore[union-attr]
            raise wrong(
                path, steps, "None with offload.optimizer on 'device'; it hides a step of states on 'cpu' or 'nvme'"
            )

    def _check_step_in_backward(self) -> None:
        path, value = "Config.step_in_backward", self.step_in_backward
        if not isinstance(value, bool):
            raise wrong(path, value, "True or False")
        if not value:
            return
        if self.clip is not None:
            raise wrong(
                path,
                value,
                f"False with clip={self.clip}: clipping needs the norm of all gradients before the first step",
            )
        if self.scales_loss:
            raise wrong(
                path, value, "False with fp16: its loss scale looks at all gradients before the first step; or bf16"
            )
        if self.stage == 0:
            raise wrong(path, value, "False at stage 0, or stage 1, 2 or 3: it steps this rank's slices")
        if self.offload.delayed_update is not None:
            raise wrong(
                path,
                value,
                "False with offload.delayed_update, which hides the step beside the next pass; one of the two",
            )
        if self.offload.grads.kind == "nvme" and self.accumulate == 1:  # type: ignore[union-attr]
            raise wrong(
                path,
                value,
                "False with offload.grads on 'nvme', or offload.grads on 'device': a gradient lives until its unit is stepped, in the same "
                "backward, so there is nothing to keep in a file; where several backwards make a step, say how many with accumulate=, since "
                "inside no_sync alone ranks hold their gradients back in memory",
            )

    def _check_comm(self) -> None:
        instance("Config.comm", self.comm, Comm)
        if self.stage < 3 and (self.comm.params != "exact" or self.comm.secondary_shard):
            raise wrong(
                "Config.comm.params",
                self.comm.params,
                f"'exact' and no secondary_shard at stage {self.stage}: parameters are gathered at stage 3 only",
            )
        if self.comm.params != "exact" and self.offload.params.kind == "nvme":  # type: ignore[union-attr]
            raise wrong(
                "Config.comm.params",
                self.comm.params,
                "'exact' with offload.params on 'nvme': the ranks of a host share what they read, and send nothing",
            )
        reduce = self.precision.reduce if isinstance(self.precision, Precision) else None
        if reduce in ("bf16", "fp16") and reduce != self.dtype_name and self.comm.grads != "exact":
            raise wrong(
                "Config.comm.grads",
                self.comm.grads,
                f"'exact' with Precision(reduce={reduce!r}): each says what travels",
            )
        if self.stage < 2 and self.comm.grads != "exact":
            raise not_yet(
                "Config.comm.grads", self.comm.grads, f"leave it at 'exact' at stage {self.stage}, or use 2 or 3"
            )
        if self.comm.secondary_shard not in (0, "host"):
            raise not_yet("Config.comm.secondary_shard", self.comm.secondary_shard, "use 'host', or 0 for none")

    @classmethod
    def from_json(cls, source: str | os.PathLike[str] | Mapping[str, Any], *, ranks: int | None = None) -> Config:
        """Reads zeropp's own keys, and DeepSpeed's JSON as it is.

        Args:
            source: a file's path, JSON text (starts with `{`), or a mapping.
            ranks: world size for DeepSpeed's batch arithmetic; default: of the process group, else of torchrun's
                environment, else 1.

        Raises:
            ConfigError: for every key that is not supported, with its path. Nothing is ignored.
        """
        fields, paths = fields_of(source, ranks, [f.name for f in dataclasses.fields(cls)])
        try:
            return build(cls, fields, "")
        except ConfigError as error:
            path = next((path for name, path in paths.items() if str(error).startswith((f"{name}:", f"{name}."))), "")
            if not path:
                raise
            raise ConfigError(f"{error} (of the file: {path})") from None


def as_config(given: Any, caller: str) -> Config:
    """Return the configuration that a user gave.

    Args:
        given: None (the defaults), a :class:`zeropp.Config`, or what ``Config.from_json`` reads.
        caller: the function that was called, for the error.

    Raises:
        zeropp.ConfigError: `given` is something else, or a key of it is refused.
    """
    if given is None:
        return Config()
    if isinstance(given, Config):
        return given
    if isinstance(given, (Mapping, str, os.PathLike)):
        return Config.from_json(given)
    raise not_a_config(given, caller)
