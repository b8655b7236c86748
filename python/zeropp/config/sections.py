# SPDX-License-Identifier: Apache-2.0
"""The sections of a configuration: tiers, offloading, element types, the loss scale and the wire, each a frozen dataclass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from zeropp import compat
from zeropp.config.values import (
    DTYPES,
    GATHER_WAYS,
    STATES,
    STORED,
    TIERS,
    WIRE_FORMATS,
    Folders,
    finite,
    folders,
    instance,
    one_of,
    refuses_unknown,
    whole,
    wrong,
)  # fmt: skip


@refuses_unknown
@dataclass(frozen=True, kw_only=True)
class Tier:
    """The place of one kind of state."""

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
        one_of("Tier.kind", self.kind, TIERS)
        if self.path is not None:
            object.__setattr__(self, "path", folders("Tier.path", self.path))
        if (self.kind == "nvme") != (self.path is not None):
            raise wrong("Tier.path", self.path, "a folder for 'nvme', and None for 'device' and 'cpu'")
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, (int, float)) or not 0 < self.fraction <= 1:
            raise wrong("Tier.fraction", self.fraction, "a number above 0 and at most 1 (share of the bytes)")

    @property
    def folders(self) -> tuple[str, ...]:
        """Return the folders of `path`; none where there is no path."""
        if self.path is None:
            return ()
        return (self.path,) if isinstance(self.path, str) else cast(tuple[str, ...], self.path)


@refuses_unknown
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
    reads it ahead of backward, and takes `fraction`. With a model on a GPU "cpu" does so with page-locked memory of the host;
    on the CPU "cpu" is where they are. Each rank offloads its own."""

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
            whole("Offload.delayed_update", self.delayed_update, 0, "exact steps before the delay; None: no delay")
        if self.path is not None:
            object.__setattr__(self, "path", folders("Offload.path", self.path))
        kinds = ("params", "grads", "optimizer", "activations")
        named = [self._make_tier(name) for name in kinds]
        if self.checksums and all(getattr(self, name).kind != "nvme" for name in kinds):
            raise wrong("Offload.checksums", True, "False where nothing is on 'nvme'")
        if self.path is not None and "nvme" not in named:
            raise wrong("Offload.path", self.path, "None where no kind is given by name as 'nvme'")
        object.__setattr__(self, "path", None)  # it is the tiers' now, so that equal offloads are equal

    def _make_tier(self, name: str) -> str | None:
        """Make a `Tier` of a kind that is given by name, and return that name."""
        value: Any = getattr(self, name)
        given = value if isinstance(value, str) else None
        if given is not None:
            one_of(f"Offload.{name}", given, TIERS)
            if given == "nvme" and self.path is None:
                raise wrong("Offload.path", None, f"a folder for {name}='nvme'")
            value = Tier(given, path=self.path if given == "nvme" else None)
        instance(f"Offload.{name}", value, Tier)
        if self.checksums and value.kind == "nvme":
            value = dataclasses.replace(value, checksums=True)
        object.__setattr__(self, name, value)
        return given


@refuses_unknown
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
                one_of(f"Precision.{one.name}", value, {"state": STATES, "stored": STORED}.get(one.name, DTYPES))

        if self.master == "fp16":
            raise wrong("Precision.master", self.master, "'fp32' or None; or 'bf16', for parameters in bf16")
        compat.check({f"Precision.{one.name}": getattr(self, one.name) for one in dataclasses.fields(self)})

    @property
    def autocast(self) -> str | None:
        """The type that `torch.autocast` computes in: "bf16", "fp16", or None without it."""
        return self.compute if self.compute != self.param else None


@refuses_unknown
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
            if not finite(value) or value <= 0:
                raise wrong(f"LossScale.{name}", value, "a finite number above 0")
        if self.growth < 1:
            raise wrong("LossScale.growth", self.growth, "a factor of at least 1")
        if self.backoff >= 1:
            raise wrong("LossScale.backoff", self.backoff, "a factor above 0 and below 1")
        if self.least > self.init:
            raise wrong("LossScale.least", self.least, f"at most init, which is {self.init}")
        whole("LossScale.interval", self.interval, 1, "good steps")
        if not isinstance(self.dynamic, bool):
            raise wrong("LossScale.dynamic", self.dynamic, "True or False")


@refuses_unknown
@dataclass(frozen=True, kw_only=True)
class Comm:
    """The format of communication: exact, or 8 or 4 bits (ZeRO++). One rank alone sends nothing, and is exact."""

    params: str = "exact"
    """Form of gathered parameters: "exact", or "int8"/"int4" (qwZ): every rank computes with the same rounded values, the
    shards that the optimizer updates stay exact, and so does what is read, saved or exported. Other than "exact" needs
    stage 3, and makes `host_copy="auto"` gather: ranks that share one copy send nothing that could be compressed."""

    grads: str = "exact"
    """Form of reduced gradients: "exact", or "int8"/"int4" (qgZ); sums are in fp32. Other than "exact" needs stage 2
    or 3."""

    tokens: str = "exact"
    """Form of the rows that `Config.experts` sends between hosts, forward and backward: "exact", or "int8" with one fp32 scale a row,
    in which each element is off by at most 1/254 of the largest one of its row. Weights of experts and choices stay exact. Within a host
    rows are read where they lie, and are exact."""

    block_elems: int = 256
    """Elements that share an fp32 scale; a multiple of 16, at most 4096. Smaller blocks are nearer to exact, and send
    more scales."""

    secondary_shard: int | str = 0
    """"host": the ranks of each host keep a second copy of the parameters, split among them, so that between two steps only the
    first gather of a unit crosses the network (hpZ). 0 = none. Within one host nothing crosses anyway, and nothing is kept. Other
    numbers of ranks are not supported."""

    gather: str = "auto"
    """How GPUs that hold shards exchange them: "copy", where the ranks map each other's memory: copy engines and kernels read it in
    place; "nccl": NCCL moves the bytes, which takes processors from the computation and needs memory for a bucket and what comes of it;
    "auto": copies within one host, and NCCL over several hosts or where GPUs cannot map each other. All give the same bits."""

    def __post_init__(self) -> None:
        one_of("Comm.gather", self.gather, GATHER_WAYS)
        one_of("Comm.params", self.params, WIRE_FORMATS)
        one_of("Comm.grads", self.grads, WIRE_FORMATS)
        one_of("Comm.tokens", self.tokens, ("exact", "int8"))
        whole("Comm.block_elems", self.block_elems, 16, "elements a scale, a multiple of 16")
        if self.block_elems % 16 or self.block_elems > 4096:
            raise wrong("Comm.block_elems", self.block_elems, "a multiple of 16, at most 4096")
        if not isinstance(self.secondary_shard, str) or self.secondary_shard != "host":
            whole("Comm.secondary_shard", self.secondary_shard, 0, "ranks, or 'host'; 0 = none")
