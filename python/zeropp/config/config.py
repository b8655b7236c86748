# SPDX-License-Identifier: Apache-2.0
"""``zeropp.Config``: all of zeropp's choices in one frozen, keyword-only dataclass."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeropp import compat
from zeropp.config.efficiency import Efficiency
from zeropp.config.experts import Experts, as_experts, offload_with_experts
from zeropp.config.sections import Comm, LossScale, Offload, Precision
from zeropp.config.values import (
    DTYPES,
    TORCH_DTYPES,
    finite,
    flag,
    instance,
    nearest,
    not_a_config,
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

    efficiency: Efficiency | None = None
    """What training steps leave out: tokens, layers, attention scores. None: nothing."""

    experts: int | str | Experts | None = None
    """Expert parallelism: `experts=4`, "auto" or an `Experts(...)`: so many ranks hold different experts of each mixture-of-experts
    layer, and tokens go to the ranks of the experts that they chose. None: every rank computes with all experts, which are
    partitioned as any parameter is."""

    device: str | torch.device | None = None
    """Where shards and computation live; None: cuda:LOCAL_RANK where there is a GPU, else the CPU."""

    preflight: bool = False
    """Check every rank and link before training, as `python -m zeropp doctor` does; a second or so. A dead rank is an
    error that names it, a slow rank or link a warning."""

    def __post_init__(self) -> None:
        for name in ("preflight", "sync_buffers", "custom_optimizer", "step_in_backward"):
            flag(f"Config.{name}", getattr(self, name))
        if isinstance(self.stage, bool) or not isinstance(self.stage, int) or self.stage not in (0, 1, 2, 3):
            raise wrong("Config.stage", self.stage, "0, 1, 2 or 3")
        self._check_precision()
        self._check_units()
        self._check_ignored()
        one_of("Config.host_copy", self.host_copy, ("auto", "off"))
        self._check_prefetch()
        whole("Config.bucket_bytes", self.bucket_bytes, 0, "bytes")
        whole("Config.accumulate", self.accumulate, 1, "micro-steps a step")
        self._check_clip()
        self._check_device()
        instance("Config.offload", self.offload, Offload)
        instance("Config.comm", self.comm, Comm)
        if self.efficiency is not None:
            instance("Config.efficiency", self.efficiency, Efficiency)
        object.__setattr__(self, "experts", as_experts(self.experts))
        if self.comm.secondary_shard not in (0, "host"):
            raise wrong("Config.comm.secondary_shard", self.comm.secondary_shard, "'host', or 0 for none")
        compat.check(facts_of(self))

    @property
    def dtype_name(self) -> str | None:
        """Return the type in which parameters are held: None (the model's own types), "fp32", "bf16" or "fp16"."""
        return self.precision.param if isinstance(self.precision, Precision) else self.precision

    @property
    def autocast_name(self) -> str | None:
        """Return the type in which `torch.autocast` computes: "bf16", "fp16", or None without it."""
        return self.precision.autocast if isinstance(self.precision, Precision) else None

    @property
    def scales_loss(self) -> bool:
        """True if gradients are computed in fp16, whose range is too small for unscaled ones."""
        return "fp16" in (self.dtype_name, self.autocast_name)

    def gradient_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Return, for parameters held in `dtype`, the type in which gradients accumulate and stay, and the one in which they are reduced."""
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

    def _check_prefetch(self) -> None:
        if isinstance(self.prefetch, str):
            if self.prefetch != "auto":
                wanted = f"'auto' or a number of bytes >= 0{nearest(self.prefetch, ['auto'])}"
                raise wrong("Config.prefetch", self.prefetch, wanted)
        else:
            whole("Config.prefetch", self.prefetch, 0, "bytes, or 'auto'")

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
        # Few scripts need the tables of DeepSpeed's keys, so that they are loaded here.
        from zeropp.config.reading import build, fields_of

        fields, paths = fields_of(source, ranks, [f.name for f in dataclasses.fields(cls)])
        try:
            return build(cls, fields, "")
        except ConfigError as error:
            path = next((path for name, path in paths.items() if str(error).startswith((f"{name}:", f"{name}."))), "")
            if not path:
                raise
            raise ConfigError(f"{error} (of the file: {path})") from None


def facts_of(config: Config) -> dict[str, Any]:
    """Return what a configuration says, for :mod:`zeropp.compat`."""
    precision = config.precision if isinstance(config.precision, Precision) else Precision(param=config.precision)
    offload = offload_with_experts(config.offload, config.experts if isinstance(config.experts, Experts) else None)
    tiers: dict[str, Any] = {name: getattr(offload, name) for name in ("params", "grads", "optimizer", "activations")}
    plain = (
        "stage",
        "loss_scale",
        "host_copy",
        "accumulate",
        "clip",
        "custom_optimizer",
        "step_in_backward",
        "experts",
    )
    return {
        **{f"Config.{name}": getattr(config, name) for name in plain},
        **{f"Precision.{one.name}": getattr(precision, one.name) for one in dataclasses.fields(Precision)},
        "Experts.slices": config.experts.slices if isinstance(config.experts, Experts) else 1,
        "Experts.shared_by": config.experts.shared_by if isinstance(config.experts, Experts) else None,
        "Precision.master": config.master_name,
        "Precision.state": config.state_name,
        "Config.precision": "fp16" if config.scales_loss else config.dtype_name,
        **{f"Config.offload.{name}.kind": tier.kind for name, tier in tiers.items()},
        "Config.offload.delayed_update": config.offload.delayed_update,
        **{f"Config.comm.{one.name}": getattr(config.comm, one.name) for one in dataclasses.fields(Comm)},
    }


def with_tiers(config: Config) -> Config:
    """Return a configuration whose `offload` is that of the model as a whole: a kind that experts alone have in files is on "nvme"."""
    experts = config.experts if isinstance(config.experts, Experts) else None
    offload = offload_with_experts(config.offload, experts)
    if offload is config.offload or experts is None:
        return config
    return dataclasses.replace(config, offload=offload, experts=dataclasses.replace(experts, offload=None))


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
