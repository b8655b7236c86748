# SPDX-License-Identifier: Apache-2.0
"""The configuration: frozen, keyword-only dataclasses that refuse what they do not know.

Every mistake is a `zeropp.ConfigError` that names the path of the key, the value seen, what is allowed and the
nearest name. A value that is planned but not built says "not yet" and what to use instead; no option is read and
ignored. `Config.from_json` reads the same keys from JSON, and DeepSpeed's own files (zeropp/deepspeed_json.py).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from zeropp.errors import ConfigError
from zeropp.wording import shown

T = TypeVar("T")

DTYPES = ("fp32", "bf16", "fp16")
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TIERS = ("device", "cpu", "nvme")
WIRE_FORMATS = ("exact", "int8", "int4")
STATES = ("fp32", "bf16", "int8")
STORED = ("int8", "int4")
Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One, or several, one for each disk."""
MOST_FOLDERS = 16
"""Of one tier (ZPP_AIO_PARTS of csrc/aio/file.h)."""


MOST_NUMBER = (1 << 63) - 1
"""Whole numbers of the C core have 64 bits."""


def nearest(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'stage'` when a known name is close to `name`, else nothing."""
    if not isinstance(name, str):
        return ""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def wrong(path: str, value: object, wanted: str) -> ConfigError:
    """The error for a value that cannot be: path, value seen, what is wanted."""
    return ConfigError(f"{path}: {shown(value)} is not allowed; wanted {wanted}")


def not_yet(path: str, value: object, instead: str) -> ConfigError:
    """The error for a value that is planned but not built."""
    return ConfigError(f"{path}: {shown(value)} is not built yet; {instead}")


def _refuses_unknown(cls: type[T]) -> type[T]:
    """Class decorator: an unknown keyword is a ConfigError with the nearest name, where a dataclass raises a bare
    TypeError."""
    plain_init: Callable[..., None] = cls.__init__
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(plain_init)
    def init(self: T, *args: Any, **keywords: Any) -> None:
        for name, value in keywords.items():
            if name not in known:
                raise ConfigError(
                    f"{cls.__name__}.{name}: unknown key (value {shown(value)}); "
                    f"known are {', '.join(known)}{nearest(name, known)}"
                )
        plain_init(self, *args, **keywords)

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


def _one_of(path: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        close = nearest(value, allowed) if isinstance(value, str) else ""
        raise wrong(path, value, f"one of {', '.join(map(repr, allowed))}{close}")


def _whole(path: str, value: object, least: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong(path, value, f"a whole number >= {least} ({what})")
    if value > MOST_NUMBER:
        raise wrong(path, value, f"a whole number below 2**63 ({what})")


def _finite(value: object) -> bool:
    """True if `value` is a number that a float can hold, and finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def folders(path: str, value: object) -> str | tuple[str, ...]:
    """A folder's name, or those of several: a tuple, each once. One alone is a name, however it was given."""
    wanted = "a folder's name, or a list of up to 16, one for each disk"
    several = isinstance(value, (list, tuple))
    names: list[str] = []
    for one in value if isinstance(value, (list, tuple)) else (value,):
        name = os.fspath(one) if isinstance(one, os.PathLike) else one
        if not isinstance(name, str) or not name or not _can_be_a_path(name):
            raise wrong(path, value, wanted)
        names.append(os.path.expanduser(name))  # noqa: PTH111  Path's raises where there is no such user
    if several and not 1 <= len(names) <= MOST_FOLDERS:
        raise wrong(path, value, f"{wanted}; there are {len(names)}")
    if len(names) == 1:
        return names[0]
    where: dict[str, str] = {}
    for name in names:
        real = os.path.realpath(name)
        if real in where:
            raise wrong(path, value, f"each folder once; {where[real]!r} and {name!r} are the same one")
        where[real] = name
    return tuple(names)


def _can_be_a_path(name: str) -> bool:
    """False for a name that the operating system cannot be given: with a NUL, or with half of a surrogate pair."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _instance(path: str, value: object, cls: type) -> None:
    if not isinstance(value, cls):
        raise wrong(path, value, f"a zeropp.{cls.__name__}(...)")


@_refuses_unknown
@dataclass(frozen=True, kw_only=True)
class Tier:
    """Where one kind of state lives."""

    kind: str = field(default="device", kw_only=False)
    """"device" (where the model computes), "cpu" (host memory) or "nvme" (files under `path`). Without an accelerator
    "device" and "cpu" are one: "cpu" is accepted and changes nothing."""

    path: Folders | None = None
    """Folder for the scratch files of "nvme", on a local disk; required there and refused elsewhere. Each job makes one
    folder of its own in it, which goes away with the job, or with the next one after a kill. Several folders, one for each
    disk, as in `path=["/nvme0", "/nvme1"]`: files are striped over them in pieces of 2 MiB, each takes an equal share, and the
    disks work side by side. A tuple afterwards; all ranks of a host give the same ones in the same order."""

    fraction: float = 1.0
    """Share of the bytes put there, above 0 and at most 1; the rest stays one tier nearer to the device."""

    checksums: bool = False
    """With "nvme": a checksum of every page that is written, kept in memory (8 bytes for 4096), and a `TierError` where what
    is read does not have it. Costs the I/O engine's thread one pass over the bytes each way."""

    def __post_init__(self) -> None:
        if not isinstance(self.checksums, bool) or (self.checksums and self.kind != "nvme"):
            raise wrong("Tier.checksums", self.checksums, "True or False with 'nvme', False elsewhere")
        _one_of("Tier.kind", self.kind, TIERS)
        if self.path is not None:
            object.__setattr__(self, "path", folders("Tier.path", self.path))
        if (self.kind == "nvme") != (self.path is not None):
            raise wrong("Tier.path", self.path, "a folder for 'nvme', and None for 'device' and 'cpu'")
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, (int, float)) or not 0 < self.fraction <= 1:
            raise wrong("Tier.fraction", self.fraction, "a number above 0 and at most 1 (share of the bytes)")

    @property
    def folders(self) -> tuple[str, ...]:
        """Those of `path`; none where there is no path."""
        if self.path is None:
            return ()
        return (self.path,) if isinstance(self.path, str) else cast(tuple[str, ...], self.path)


@_refuses_unknown
@dataclass(frozen=True, kw_only=True)
class Offload:
    """Which tier holds each kind of state: a `Tier(...)`, or the name of a kind, as in
    `Offload(optimizer="nvme", path="/scratch")`."""

    params: Tier | str = Tier()
    """Tier of the parameter shards; other than "device" needs stage 3. "nvme" reads a unit's parameters when they are
    needed, and keeps them in memory no longer; the step writes them. It needs Adam, AdamW, Lion, Adagrad or SGD, whose steps
    can be streamed, and takes `fraction`."""

    grads: Tier | str = Tier()
    """Tier of the gradient shards; other than "device" needs stage 2 or 3. "nvme" writes them behind backward, adds to
    them there, and the step reads them beside the states. It needs Adam, AdamW, Lion, Adagrad or SGD, and takes `fraction`.
    With `Config(accumulate=)` every micro-step reduces then, so that no whole gradients wait in memory."""

    optimizer: Tier | str = Tier()
    """Tier of the optimizer's states and of the fp32 master weights; other than "device" needs stage 1, 2 or 3. "nvme"
    needs Adam, AdamW, Lion, Adagrad or SGD (their steps can be streamed: no element asks for another), and takes `fraction`:
    the share of these bytes that goes to the file."""

    activations: Tier | str = Tier()
    """Tier of what autograd keeps for backward while the model's forward runs: the inputs of checkpointed blocks where
    the model uses `torch.utils.checkpoint`, and all of it where it does not. "nvme" writes it behind the computation and
    reads it ahead of backward, and takes `fraction`. Each rank offloads its own."""

    delayed_update: int | None = None
    """One-step delayed parameter update (ZeRO-Offload, section 5.2), with `optimizer` on "cpu" or "nvme": the update runs in a
    thread of its own beside the next forward and backward, which therefore compute with weights one step older. A whole
    number: steps that are exact before the delay begins (the paper's runs: 40). None: every step is exact. It needs Adam,
    AdamW, Lion, Adagrad or SGD, and room for one more slice of gradients and of parameters, where these live: in memory, or with
    `grads` or `params` on "nvme" in their files; `step()` takes the gradients, and `optimizer.flush()` gives the model the newest
    weights."""

    path: Folders | None = None
    """Folder of the kinds that are given by name as "nvme", or several, as `Tier.path`; None afterwards, when each tier has it."""

    checksums: bool = False
    """Checksums of all kinds on "nvme", as `Tier(checksums=True)` for one: what a disk gives back is what it was given, or a
    `TierError` names file and offset."""

    def __post_init__(self) -> None:
        if not isinstance(self.checksums, bool):
            raise wrong("Offload.checksums", self.checksums, "True or False")
        if self.delayed_update is not None:
            _whole("Offload.delayed_update", self.delayed_update, 0, "exact steps before the delay; None: no delay")
        if self.path is not None:
            object.__setattr__(self, "path", folders("Offload.path", self.path))
        named = filed = False
        for name in ("params", "grads", "optimizer", "activations"):
            value: Any = getattr(self, name)
            if isinstance(value, str):
                _one_of(f"Offload.{name}", value, TIERS)
                named |= value == "nvme"
                if value == "nvme" and self.path is None:
                    raise wrong("Offload.path", None, f"a folder for {name}='nvme'")
                path = None if value != "nvme" else self.path
                object.__setattr__(self, name, Tier(value, path=path))
            _instance(f"Offload.{name}", getattr(self, name), Tier)
            tier: Any = getattr(self, name)
            filed |= tier.kind == "nvme"
            if self.checksums and tier.kind == "nvme":
                object.__setattr__(self, name, dataclasses.replace(tier, checksums=True))
        if self.checksums and not filed:
            raise wrong("Offload.checksums", True, "False where nothing is on 'nvme'")
        if self.path is not None and not named:
            raise wrong("Offload.path", self.path, "None where no kind is given by name as 'nvme'")
        object.__setattr__(self, "path", None)  # it is the tiers' now, so that equal offloads are equal


@_refuses_unknown
@dataclass(frozen=True, kw_only=True)
class Precision:
    """Element types by purpose; None leaves the choice to the others. `Config(precision="bf16")` is the short
    form."""

    param: str | None = None
    """Type the parameters are held and gathered in; None keeps the model's own. Floating inputs are cast to it."""

    compute: str | None = None
    """Type of the computation; None means `param`: parameters compute in the type they are held in. "bf16" or "fp16" with
    parameters in fp32 (or None, for a model in fp32) runs the model's forward under `torch.autocast`: each operation takes the
    type that autocast's lists give it, and gradients are fp32. Without checkpointing autograd then keeps a
    copy in 16 bits of each weight that a linear layer used, until its backward."""

    reduce: str | None = None
    """Type of gradients on the wire; None means that of the parameters. Sums over ranks are in fp32 whatever it is. "fp32" with
    parameters in 16 bits: gradients also add up over micro-steps, travel, stay and reach the step in fp32. "bf16" or "fp16" with
    parameters in fp32: half of the bytes on the wire; gradients add up in fp32, and are rounded once, when they go out.
    Parameters in float64 take None only: their sums over ranks are in float64."""

    accumulate: str | None = None
    """Type that gradients add up in over micro-steps, and that reduced ones are held in. None: that of the parameters where they
    travel in it too, else fp32. "fp32": so in any case, whatever travels."""

    master: str | None = None
    """Type of the copy that the optimizer updates; None means fp32. "bf16", for parameters in bf16: there is no copy, the step
    updates the parameters themselves, in fp32 arithmetic, and rounds them stochastically, so that their mean is right. With
    state="bf16" a parameter then takes 6 bytes where it took 14, beside its gradient. Adam and AdamW, in memory."""

    state: str | None = None
    """Type of the optimizer's states; None means fp32. "bf16" holds those of Adam, AdamW, Lion, Adagrad, SGD with momentum
    and LAMB in half of the bytes, "int8" in a quarter (8-bit codes with a scale for every 256 elements); both are rounded
    stochastically, so that a state's mean is right, and the step itself is in fp32. Other optimizers, and states on NVMe,
    take fp32 only."""

    stored: str | None = None
    """Type that the matrices of linear layers and experts are kept in, for a model that is only evaluated, with `Offload(params=)`
    on "nvme" or "cpu": "int8" or "int4", codes with an fp32 scale for every 64 elements, rounded to nearest once, in `prepare`.
    They are read and become numbers of `param` when they are needed. Of a `fraction` on "nvme" the rest stays in memory in as few
    bits, on "cpu" as numbers, rounded alike. Each host has a copy. None: as they are. Training refuses it."""

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if isinstance(value, torch.dtype):
                short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8"}.get(
                    value
                )
                object.__setattr__(self, one.name, short or value)
                value = short or value
            if value is not None:
                _one_of(f"Precision.{one.name}", value, {"state": STATES, "stored": STORED}.get(one.name, DTYPES))

        self._check_together()

    def _check_together(self) -> None:
        if self.master == "fp16" or (self.master == "bf16" and self.param not in (None, "bf16")):
            raise wrong(
                "Precision.master",
                self.master,
                f"'fp32' or None with param={self.param!r}; 'bf16' is for parameters in bf16",
            )
        if self.param in ("bf16", "fp16") and self.compute not in (None, self.param):
            raise wrong(
                "Precision.compute",
                self.compute,
                f"{self.param!r} or None with param={self.param!r}: what is held in 16 bits computes in them",
            )
        if self.param is None and self.compute == "fp32":
            raise wrong("Precision.compute", self.compute, "None, or param='fp32' with it")
        if self.accumulate not in (None, "fp32") and not self.accumulate == self.param == (self.reduce or self.param):
            raise wrong(
                "Precision.accumulate",
                self.accumulate,
                f"'fp32' or None with param={self.param!r} and reduce={self.reduce!r}: sums are in fp32, or in the one type of both",
            )

    @property
    def autocast(self) -> str | None:
        """The type that `torch.autocast` computes in: "bf16", "fp16", or None without it."""
        return self.compute if self.compute != self.param else None


@_refuses_unknown
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How fp16's losses are scaled; the defaults and the rule are those of `torch.amp.GradScaler`."""

    init: float = 65536.0
    """First scale."""

    growth: float = 2.0
    """Factor after `interval` good steps in a row; 1 = never grows."""

    backoff: float = 0.5
    """Factor after a step that was skipped because a gradient was not finite; above 0 and below 1."""

    interval: int = 2000
    """Good steps in a row before the scale grows."""

    least: float = 1.0
    """The scale never goes below; a gradient that is not finite at this scale is an error."""

    dynamic: bool = True
    """False: the scale stays at `init`, and a gradient that is not finite is an error."""

    def __post_init__(self) -> None:
        for name in ("init", "growth", "backoff", "least"):
            value = getattr(self, name)
            if not _finite(value) or value <= 0:
                raise wrong(f"LossScale.{name}", value, "a finite number above 0")
        if self.growth < 1:
            raise wrong("LossScale.growth", self.growth, "a factor of at least 1")
        if self.backoff >= 1:
            raise wrong("LossScale.backoff", self.backoff, "a factor above 0 and below 1")
        if self.least > self.init:
            raise wrong("LossScale.least", self.least, f"at most init, which is {self.init}")
        _whole("LossScale.interval", self.interval, 1, "good steps")
        if not isinstance(self.dynamic, bool):
            raise wrong("LossScale.dynamic", self.dynamic, "True or False")


@_refuses_unknown
@dataclass(frozen=True, kw_only=True)
class Comm:
    """What travels between ranks: exactly, or in 8 or 4 bits (ZeRO++). One rank alone sends nothing, and is exact."""

    params: str = "exact"
    """Form of gathered parameters: "exact", or "int8"/"int4" (qwZ): every rank computes with the same rounded values, the
    shards that the optimizer updates stay exact, and so does what is read, saved or exported. Other than "exact" needs
    stage 3, and makes `host_copy="auto"` gather: ranks that share one copy send nothing that could be compressed."""

    grads: str = "exact"
    """Form of reduced gradients: "exact", or "int8"/"int4" (qgZ); sums are in fp32. Other than "exact" needs stage 2
    or 3."""

    block_elems: int = 256
    """Elements that share an fp32 scale; a multiple of 16, at most 4096. Smaller blocks are nearer to exact, and send
    more scales."""

    secondary_shard: int | str = 0
    """"host": the ranks of each host keep a second copy of the parameters, split among them, so that between two steps only the
    first gather of a unit crosses the network (hpZ). 0 = none. Within one host nothing crosses anyway, and nothing is kept. A
    number of ranks other than a host's is not built yet."""

    def __post_init__(self) -> None:
        _one_of("Comm.params", self.params, WIRE_FORMATS)
        _one_of("Comm.grads", self.grads, WIRE_FORMATS)
        _whole("Comm.block_elems", self.block_elems, 16, "elements a scale, a multiple of 16")
        if self.block_elems % 16 or self.block_elems > 4096:
            raise wrong("Comm.block_elems", self.block_elems, "a multiple of 16, at most 4096")
        if not isinstance(self.secondary_shard, str) or self.secondary_shard != "host":
            _whole("Comm.secondary_shard", self.secondary_shard, 0, "ranks, or 'host'; 0 = none")


@_refuses_unknown
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

    offload: Offload = Offload()
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

    comm: Comm = Comm()
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
        _one_of("Config.host_copy", self.host_copy, ("auto", "off"))
        if not isinstance(self.prefetch, str) or self.prefetch != "auto":
            if isinstance(self.prefetch, str):
                raise wrong(
                    "Config.prefetch",
                    self.prefetch,
                    f"'auto' or a number of bytes >= 0{nearest(self.prefetch, ['auto'])}",
                )
            _whole("Config.prefetch", self.prefetch, 0, "bytes, or 'auto'")
        _whole("Config.bucket_bytes", self.bucket_bytes, 0, "bytes")
        _whole("Config.accumulate", self.accumulate, 1, "micro-steps a step")
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
            _one_of("Config.precision", self.precision, DTYPES)
        self._check_loss_scale()

    def _check_loss_scale(self) -> None:
        value = self.loss_scale
        if value is None:
            return
        if not isinstance(value, LossScale):
            if not _finite(value) or value <= 0:
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
            _whole("Config.units", units, 1, "bytes of parameters a unit; or 'auto', or classes")

    def _check_ignored(self) -> None:
        names: Any = (self.ignored,) if isinstance(self.ignored, str) else self.ignored
        if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) and one for one in names):
            raise wrong("Config.ignored", self.ignored, "names of parameters or modules, or patterns of them")
        object.__setattr__(self, "ignored", tuple(names))

    def _check_clip(self) -> None:
        if self.clip is None:
            return
        if not _finite(self.clip) or self.clip <= 0:
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
        _instance("Config.offload", self.offload, Offload)
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
        _instance("Config.comm", self.comm, Comm)
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
        from zeropp.config.reading import check_json
        from zeropp.deepspeed_json import fields_from_deepspeed, is_deepspeed_key

        keys = _read_json(source)
        native = {k: v for k, v in keys.items() if not is_deepspeed_key(k)}
        foreign = {k: v for k, v in keys.items() if is_deepspeed_key(k)}
        fields = _fields_from_native(native)
        for name, value in foreign.items():
            check_json(value, name)
        read = fields_from_deepspeed(foreign, ranks)
        for name, (path, value) in read.items():
            if name in fields:
                raise ConfigError(f"{path}: says again what {name!r} says; give one of the two")
            fields[name] = value
        try:
            return _build(cls, fields, "")
        except ConfigError as error:
            path = next(
                (path for name, (path, _) in read.items() if str(error).startswith((f"{name}:", f"{name}."))), ""
            )
            if not path:
                raise
            raise ConfigError(f"{error} (of the file: {path})") from None


def _read_json(source: str | os.PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, os.PathLike)):
        from zeropp.config.reading import not_a_config

        raise not_a_config(source, "Config.from_json")
    where = "JSON text"
    text = os.fsdecode(source)
    if not text.lstrip().startswith("{"):
        where = text
        try:
            text = Path(where).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError: no text, or a name with a NUL
            raise ConfigError(f"{where}: cannot be read as a configuration: {error}") from error
    try:
        keys = json.loads(text, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from error
    except ConfigError:
        raise
    except (RecursionError, ValueError) as error:  # a ValueError: a number of more than 4300 digits
        raise ConfigError(f"{where}: cannot be read as a configuration: {error}") from error
    if not isinstance(keys, dict):
        raise ConfigError(f"{where}: holds a {type(keys).__name__}; wanted one JSON object")
    return keys


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{twice}: stands twice in one JSON object; keep one")
    return keys


_NESTED: dict[str, type] = {"offload": Offload, "comm": Comm, "precision": Precision, "loss_scale": LossScale}
_TIER_KEYS = ("params", "grads", "optimizer", "activations")


def _fields_from_native(native: Mapping[str, Any]) -> dict[str, Any]:
    from zeropp.deepspeed_json import DEEPSPEED_KEYS

    known = [f.name for f in dataclasses.fields(Config)]
    fields: dict[str, Any] = {}
    for name, value in native.items():
        if name not in known:
            raise ConfigError(
                f"{name if isinstance(name, str) else shown(name)}: unknown key (value {shown(value)}); known are {', '.join(known)}, "
                f"and DeepSpeed's{nearest(name, [*known, *DEEPSPEED_KEYS])}"
            )
        if name == "offload" and isinstance(value, Mapping):
            tiers = {
                k: _build(Tier, v, f"offload.{k}") if isinstance(v, Mapping) and k in _TIER_KEYS else v
                for k, v in value.items()
            }
            fields[name] = _build(Offload, tiers, "offload")
        elif name in _NESTED and isinstance(value, Mapping):
            fields[name] = _build(_NESTED[name], value, name)
        else:
            fields[name] = value
    return fields


def _build(cls: type[T], fields: Mapping[str, Any], path: str) -> T:
    """`cls(**fields)`, whose errors name the path in the file in place of the class."""
    for key in fields:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: the key {shown(key)} is not allowed; wanted a string")
    try:
        return cls(**fields)
    except ConfigError as error:
        prefix = f"{cls.__name__}."
        text = str(error)
        if not text.startswith(prefix):
            raise
        raise ConfigError((path + "." if path else "") + text[len(prefix) :]) from None
