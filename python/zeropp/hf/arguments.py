# SPDX-License-Identifier: Apache-2.0
"""Training arguments with the field ``zeropp``."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import transformers
from transformers.utils import strtobool

import zeropp
from zeropp.comm import default_group
from zeropp.errors import ConfigError, what_it_is

HELP = "zeropp: a configuration file (zeropp's or DeepSpeed's), JSON text, or a dict; trains with ZeRO"


def _restore(base: type, state: dict[str, Any]) -> Any:
    """Unpickle arguments whose class was made by :func:`ArgumentsFor`."""
    cls = ArgumentsFor(base)
    arguments = cls.__new__(cls)
    arguments.__dict__.update(state)
    return arguments


def _begin_group(arguments: Any) -> None:
    """On CPUs the ranks meet over zeropp; with ``--ddp_backend gloo`` over that."""
    on_cpu = arguments.use_cpu or strtobool(os.environ.get("ACCELERATE_USE_CPU", "false"))
    if on_cpu and arguments.ddp_backend in (None, default_group.BACKEND):
        default_group.begin(timedelta(seconds=arguments.ddp_timeout))
        arguments.ddp_backend = None  # Accelerate refuses every name but gloo's here


@functools.cache
def ArgumentsFor(base: type) -> Any:
    """Return ``base`` (TrainingArguments or a subclass: SFTConfig, ...) with one more field, ``zeropp``.

    Works with ``HfArgumentParser`` (``--zeropp config.json``) and in the constructor (``zeropp={"stage": 3}``, a path, or a
    :class:`zeropp.Config`). The same base gives the same class. Instances pickle by their base, so ``training_args.bin`` loads
    wherever zeropp and the base do.
    """
    parent: Any = base
    if "zeropp" in getattr(parent, "__dataclass_fields__", {}):
        return base

    def __post_init__(self: Any) -> None:
        from zeropp.hf.settings import config_for

        if isinstance(self.zeropp, os.PathLike):
            self.zeropp = os.fspath(self.zeropp)  # the base writes its fields as JSON
        given, self.zeropp_config = self.zeropp, None
        if isinstance(given, zeropp.Config):  # a Config is not JSON, which the base wants of its fields
            self.zeropp = None
        if given is not None and given != "":
            _begin_group(self)
        parent.__post_init__(self)
        if given is None or given == "":
            return
        if self.zeropp is None:
            self.zeropp = given
        if not isinstance(self.zeropp, (str, dict, zeropp.Config)):
            raise ConfigError(f"zeropp: {what_it_is(self.zeropp)}; wanted a path, JSON text, a dict or a zeropp.Config")
        self.zeropp_config = config_for(self.zeropp, self)

    def place_model_on_device(self: Any) -> Any:
        return parent.place_model_on_device.fget(self) if self.zeropp_config is None else False

    def to_dict(self: Any) -> dict[str, Any]:
        plain: dict[str, Any] = parent.to_dict(self)
        if isinstance(self.zeropp, zeropp.Config):
            plain["zeropp"] = repr(self.zeropp)
        return plain

    def __reduce__(self: Any) -> Any:
        return _restore, (base, dict(self.__dict__))

    namespace = {
        "__annotations__": {"zeropp": "dict | str | None"},
        "__doc__": base.__doc__,
        "__module__": __name__,
        "__post_init__": __post_init__,
        "__reduce__": __reduce__,
        "place_model_on_device": property(place_model_on_device),
        "to_dict": to_dict,
        "zeropp": field(default=None, metadata={"help": HELP}),
        "_VALID_DICT_FIELDS": [*parent._VALID_DICT_FIELDS, "zeropp"],
    }
    return dataclass(type(base.__name__, (base,), namespace))


TrainingArguments: Any = ArgumentsFor(transformers.TrainingArguments)
"""transformers.TrainingArguments with the field ``zeropp``."""


def __getattr__(name: str) -> Any:
    if name == "Seq2SeqTrainingArguments":  # a dataclass of a hundred fields takes milliseconds to make
        return ArgumentsFor(transformers.Seq2SeqTrainingArguments)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["ArgumentsFor", "TrainingArguments"]
