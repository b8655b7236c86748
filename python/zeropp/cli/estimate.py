# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp estimate MODEL``: what a run will hold and move, before it runs. Builds no weights.

MODEL is a Hugging Face folder or its ``config.json`` (or a name that transformers knows), or ``package.module:function``,
a function without arguments that returns the model. It may stand at the end, after options that take several values.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from zeropp.cli import at_least_one, refuse
from zeropp.config import TIERS, WIRE_FORMATS, Comm, Config, Experts, Offload, Precision, Tier
from zeropp.errors import ConfigError, Error, NotBuiltError, counted, one_line, what_it_is
from zeropp.zero.memory_plan import estimate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``estimate``."""
    parser.usage = "%(prog)s MODEL --ranks N [options]"
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a Hugging Face folder, its config.json, or package.module:function"
    )
    parser.add_argument("--ranks", type=at_least_one, metavar="N", help="how many, on all hosts together; or --mesh")
    parser.add_argument(
        "--hosts", type=at_least_one, default=1, metavar="N", help="how many hosts, with as many ranks each; default: 1"
    )
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="of ZeRO (3)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="default: the model's own types")
    parser.add_argument("--states", choices=("fp32", "bf16", "int8"), default="fp32", help="Adam's moments (fp32)")
    parser.add_argument("--optimizer", default="AdamW", help="AdamW, Lion, 'SGD with momentum', none, ... (AdamW)")
    parser.add_argument(
        "--tiers", nargs="*", default=[], metavar="KIND=TIER", help="such as optimizer=nvme or optimizer=nvme:0.5"
    )
    parser.add_argument(
        "--paths",
        nargs="*",
        default=[],
        metavar="FOLDER",
        help="of the tiers on nvme, one for each disk: what each takes",
    )
    parser.add_argument(
        "--comm", nargs="*", default=[], metavar="KIND=FORMAT", help="such as params=int8 or grads=int4 (exact)"
    )
    parser.add_argument("--host-copy", choices=("auto", "off"), default="auto", help="one shared copy a host (auto)")
    parser.add_argument(
        "--experts",
        metavar="N",
        help="ranks with different experts, or auto: Config(experts=N); those of tp share their tokens; default: none",
    )
    parser.add_argument("--tokens", type=int, help="a rank and step; with --tflops: the bandwidth each tier needs")
    parser.add_argument("--tflops", type=float, help="that a rank's computation reaches")
    parser.add_argument(
        "--mesh", nargs="*", default=[], metavar="NAME=RANKS", help="in place of --ranks, such as pp=2 dp=4 tp=2"
    )
    parser.add_argument("--micro-batches", type=at_least_one, default=1, metavar="N", help="of a step; with --mesh (1)")
    parser.add_argument("--sequence", type=at_least_one, metavar="TOKENS", help="of a micro-batch; with --mesh")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(options: argparse.Namespace) -> int:
    """Print the table. Exit status: 0, or 2 where the model or an option cannot be used."""
    try:
        model = _model_of(options)
        found = estimate(
            build(model), _config(options), ranks=options.ranks, hosts=options.hosts, optimizer=options.optimizer,
            tokens=options.tokens, tflops=options.tflops, mesh=dict(map(_size_of, options.mesh)) or None,
            micro_batches=options.micro_batches, sequence=options.sequence,
        )  # fmt: skip
    except (Error, OSError, ValueError) as error:
        return refuse("estimate", error)
    print(json.dumps(found) if options.json else _table(found, options))
    return 0


def _model_of(options: argparse.Namespace) -> str:
    """MODEL: its own argument, or what an option of several values took for one more of its own."""
    if options.model is not None:
        return str(options.model)
    for values in (options.tiers, options.comm, options.mesh):
        if values and "=" not in values[-1]:
            return str(values.pop())
    if len(options.paths) > 1 or (options.paths and ":" in options.paths[-1]):
        return str(options.paths.pop())
    raise ConfigError("MODEL is missing; wanted a Hugging Face folder, its config.json, or package.module:function")


def _config(options: argparse.Namespace) -> Config:
    tiers = dict(_tier_of(one, options.paths) for one in options.tiers)
    if options.paths and not any(tier.kind == "nvme" for tier in tiers.values()):
        raise ConfigError(
            f"--paths {' '.join(options.paths)}: nothing is on nvme; wanted --tiers optimizer=nvme or so with it"
        )
    formats = dict(map(_format_of, options.comm))
    return Config(
        stage=options.stage, precision=Precision(param=options.precision, state=options.states), host_copy=options.host_copy,
        offload=Offload(**tiers), comm=Comm(**formats), experts=_experts_of(options.experts, options.mesh),
    )  # fmt: skip


def _experts_of(said: str | None, mesh: list[str]) -> Experts | None:
    """Return how experts are divided; the ranks of tensor parallelism hold the same tokens, as ``prepare`` wants to be told."""
    if said is None:
        return None
    if said != "auto" and not said.isdecimal():
        raise ConfigError(f"--experts {said}: wanted a number of ranks, or auto")
    cut = [name for name, size in map(_size_of, mesh) if name in ("tp", "tensor_parallel") and size > 1]
    return Experts(parallel="auto" if said == "auto" else int(said), shared_by=cut[0] if cut else None)


def _tier_of(said: str, paths: list[str]) -> tuple[str, Any]:
    """Return (kind, tier) of one KIND=TIER or KIND=TIER:FRACTION."""
    kind, _, where = said.partition("=")
    name, _, fraction = where.partition(":")
    if kind not in ("params", "grads", "optimizer", "activations"):
        raise ConfigError(
            f"--tiers {said}: '{kind}' is not allowed; wanted params, grads, optimizer or activations, as in optimizer=nvme"
        )
    if name not in TIERS:
        raise ConfigError(f"--tiers {said}: '{name}' is not allowed; wanted {kind}=device, {kind}=cpu or {kind}=nvme")
    try:
        share = float(fraction or 1.0)
    except ValueError:
        raise ConfigError(
            f"--tiers {said}: {fraction!r} is not a number; wanted a share, as in optimizer=nvme:0.5"
        ) from None
    return kind, Tier(name, path=(paths or ".") if name == "nvme" else None, fraction=share)  # nothing is written


def _size_of(said: str) -> tuple[str, int]:
    """Return (name, ranks) of one NAME=RANKS."""
    name, _, size = said.partition("=")
    if not size.isdecimal():
        raise ConfigError(f"--mesh {said}: {size!r} is not a number of ranks; wanted a name and ranks, as in tp=2")
    return name, int(size)


def _format_of(said: str) -> tuple[str, Any]:
    """Return (kind, format) of one KIND=FORMAT."""
    kind, _, form = said.partition("=")
    if kind not in ("params", "grads"):
        raise ConfigError(f"--comm {said}: '{kind}' is not allowed; wanted params or grads, as in grads=int8")
    if form not in WIRE_FORMATS:
        raise ConfigError(
            f"--comm {said}: '{form}' is not allowed; wanted {', '.join(f'{kind}={x}' for x in WIRE_FORMATS)}"
        )
    return kind, form


def build(what: str) -> Any:
    """Return the model on the meta device."""
    _, colon, _ = what.partition(":")
    return _call(what) if colon and not Path(what).exists() else _hugging_face(what)


def _call(what: str) -> Any:
    """``package.module:function``. Whatever the user's code raises is an error of ours that names it."""
    module, _, function = what.partition(":")
    sys.path.insert(0, "")
    try:
        maker = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError, TypeError) as error:  # the last two: a name that none can have
        raise ConfigError(f"{what}: {one_line(error)}; wanted package.module:function") from error
    except Exception as error:
        raise ConfigError(f"{what}: importing {module} raised {type(error).__name__}: {one_line(error)}") from error
    if not callable(maker) or isinstance(maker, torch.nn.Module):
        raise ConfigError(
            f"{what}: '{function}' is {what_it_is(maker)}; wanted a function without arguments that returns the model"
        )
    needed = _needed(maker)
    if needed:
        raise ConfigError(
            f"{what}: '{function}' needs {counted(len(needed), 'argument')} ({', '.join(needed)}); wanted a function without arguments "
            "that returns the model, so write one that calls it"
        )
    try:
        with torch.device("meta"):
            model = maker()
    except Exception as error:
        raise ConfigError(f"{what}: '{function}' raised {type(error).__name__}: {one_line(error)}") from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{what}: '{function}' returned {what_it_is(model)}; wanted a torch.nn.Module")
    return model


def _needed(maker: Any) -> list[str]:
    """Return the names of the arguments without which it cannot be called."""
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature: the call will tell
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in optional]


def _hugging_face(what: str) -> Any:
    """A folder, a ``config.json``, or a name. transformers raises whatever its parts raise: ours names the model."""
    try:
        import transformers
    except ImportError as error:
        raise NotBuiltError(f"{what}: reading it needs transformers: pip install transformers") from error
    wanted = "wanted a Hugging Face folder, its config.json, or package.module:function"
    if not what or (what.startswith((".", "/", "~")) and not Path(what).exists()):
        raise ConfigError(f"{what!r}: there is no such file or folder; {wanted}")
    try:
        config = transformers.AutoConfig.from_pretrained(what)
        with torch.device("meta"):
            for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
                if type(config) in auto._model_mapping:
                    return auto.from_config(config)
    except Exception as error:
        raise ConfigError(
            f"{what}: transformers cannot make a model of it: {type(error).__name__}: {one_line(error)}; {wanted}"
        ) from error
    raise ConfigError(f"{what}: transformers knows no model of {type(config).__name__}")


def _disk(folder: str) -> tuple[int, int] | None:
    """Return (device, bytes free) of its file system, or that of the nearest folder above it that is there; None: it cannot be
    asked."""
    try:
        there = next(one for one in (Path(folder), *Path(folder).absolute().parents) if one.exists())
        return there.stat().st_dev, shutil.disk_usage(there).free
    except OSError:
        return None


def _rooms(shares: dict[str, float], ranks: int) -> Iterator[tuple[str, float, float, int | None]]:
    """Yield (folder, bytes of ``ranks`` ranks, those in all folders on its disk, bytes free there)."""
    disks = {folder: _disk(folder) for folder in shares}
    for folder, disk in disks.items():
        neighbours = [one for one, other in disks.items() if disk and other and other[0] == disk[0]] or [folder]
        yield folder, shares[folder] * ranks, sum(shares[one] for one in neighbours) * ranks, disk and disk[1]


def _ranks_of(options: argparse.Namespace) -> tuple[int, str]:
    """Return how many ranks there are, and which of them is described."""
    if options.mesh:
        return math.prod(size for _, size in map(_size_of, options.mesh)), "the fullest"
    return int(options.ranks), "each"


def _experts_lines(found: dict[str, Any], options: argparse.Namespace, amount: Callable[[float], str]) -> Iterator[str]:
    """Yield what experts take, and where bringing tokens to them costs as much as bringing them to tokens."""
    yield f"  experts on {options.experts} ranks: {counted(found['parameters'], 'parameter')}, {found['of_a_token']} of a token"
    if "crossing" in found:
        token, weights = amount(found["token_bytes"]).strip(), amount(found["weight_bytes"]).strip()
        yield f"  a forward moves {token} for each token, or {weights} of weights: at {counted(found['crossing'], 'token')} a rank both are equal"


def _tier_lines(found: dict[str, Any], amount: Any) -> Iterator[str]:
    """Yield the bytes of each kind in each tier, and their sum; page_locked counts others again."""
    for tier in filter(found.get, ("device", "pinned", "cpu", "nvme")):
        yield from (f"  {tier:6} {kind:12} {amount(value)}" for kind, value in found[tier].items())
        total = sum(value for kind, value in found[tier].items() if kind != "page_locked")
        yield f"  {tier:6} {'sum':12} {amount(total)}"


def _table(found: dict[str, Any], options: argparse.Namespace) -> str:
    def amount(value: float) -> str:
        for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
            if value >= size:
                return f"{value / size:8.2f} {unit}"
        return f"{value / 1e3:8.2f} kB"

    ranks, which = _ranks_of(options)
    lines = [
        f"{counted(found['parameters'], 'parameter')} in {counted(found['units'], 'unit')} on {counted(ranks, 'rank')}; bytes of {which} rank"
    ]
    lines += _tier_lines(found, amount)
    shares = found.get("folders") or dict.fromkeys(options.paths, sum(found["nvme"].values()))
    for folder, here, on_disk, free in _rooms(shares, ranks // options.hosts):
        room = f", {amount(on_disk).strip()} with the other folders on its disk," if on_disk > here else ""
        if free is not None:
            room += f" of {amount(free).strip()} free" + (", too little" if free < on_disk else "")
        lines.append(
            f"  nvme   {folder}: {amount(shares[folder]).strip()}; of this host's ranks {amount(here).strip()}{room}"
        )
    for kind, value in found["traffic"].items():
        need = (
            f", {amount(found['bandwidth'][kind]).strip()}/s to take as long as the computation"
            if kind in found.get("bandwidth", {})
            else ""
        )
        lines.append(f"  a step moves {amount(value)} ({kind}){need}")
    if "experts" in found:
        lines += _experts_lines(found["experts"], options, amount)
    lines.append("activations are not in it")
    return "\n".join(lines)
