# SPDX-License-Identifier: Apache-2.0
"""Names of DeepSpeed whose feature zeropp does not have yet: each can be imported, compared, subclassed and asked about with
isinstance, and raises a ConfigError when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeropp.errors import ConfigError


def not_built(what: str, instead: str) -> ConfigError:
    return ConfigError(f"deepspeed's {what} is not supported by zeropp; {instead}")


class _Later(type):
    """A class whose instances, and whose own functions, do not exist yet."""

    _zeropp_instead: tuple[str, str]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise not_built(*cls._zeropp_instead)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        return _function(name, f"{cls._zeropp_instead[0]}.{name}", cls._zeropp_instead[1])


def later(full_name: str, instead: str) -> Any:
    """Return a stand-in for a name: a class where DeepSpeed has one, judged by its first letter, else a function."""
    what, name = full_name.removeprefix("deepspeed."), full_name.rpartition(".")[2]
    if name.lstrip("_")[:1].isupper():
        return _Later(name, (), {"__doc__": f"Not built yet; {instead}.", "_zeropp_instead": (what, instead)})
    return _function(name, what, instead)


def _function(name: str, what: str, instead: str) -> Callable[..., Any]:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise not_built(what, instead)

    raises.__name__ = raises.__qualname__ = name
    raises.__doc__ = f"Not built yet; {instead}."
    raises._zeropp_instead = (what, instead)  # type: ignore[attr-defined]
    return raises


def is_later(value: Any) -> bool:
    """True for what :func:`later` made."""
    return isinstance(value, _Later) or "_zeropp_instead" in getattr(value, "__dict__", {})


# Class: name of the op, and what zeropp has in its place.
_OPS: dict[str, tuple[str, str | None]] = {
    "AsyncIOBuilder": ("async_io", "use zeropp.aio.Engine"),
    "GDSBuilder": ("gds", None),
    "CPUAdamBuilder": ("cpu_adam", "use deepspeed.ops.adam.DeepSpeedCPUAdam, or torch.optim.AdamW, which zeropp steps with its kernel"),
    "FusedAdamBuilder": ("fused_adam", "use deepspeed.ops.adam.FusedAdam, or torch.optim.AdamW, which zeropp steps with its kernel"),
    "CPUAdagradBuilder": ("cpu_adagrad", "use deepspeed.ops.adagrad.DeepSpeedCPUAdagrad, or torch.optim.Adagrad"),
    "CPULionBuilder": ("cpu_lion", "use deepspeed.ops.lion.DeepSpeedCPULion, or zeropp.optim.Lion"),
    "FusedLionBuilder": ("fused_lion", "use deepspeed.ops.lion.FusedLion, or zeropp.optim.Lion"),
    "FusedLambBuilder": ("fused_lamb", "use zeropp.optim.LAMB"),
    **{
        name: (op, None)
        for name, op in {
            "CCLCommBuilder": "deepspeed_ccl_comm", "DeepCompileBuilder": "dc", "EvoformerAttnBuilder": "evoformer_attn",
            "FPQuantizerBuilder": "fp_quantizer", "InferenceBuilder": "transformer_inference", "InferenceCoreBuilder": "inference_core_ops",
            "InferenceCutlassBuilder": "cutlass_ops", "NotImplementedBuilder": "deepspeed_not_implemented", "PinMemoryBuilder": "pin_memory",
            "QuantizerBuilder": "quantizer", "RaggedOpsBuilder": "ragged_device_ops", "RaggedUtilsBuilder": "ragged_ops",
            "RandomLTDBuilder": "random_ltd", "ShareMemCommBuilder": "deepspeed_shm_comm", "SparseAttnBuilder": "sparse_attn",
            "SpatialInferenceBuilder": "spatial_inference", "StochasticTransformerBuilder": "stochastic_transformer",
            "TransformerBuilder": "transformer", "UtilsBuilder": "utils",
        }.items()
    },
}  # fmt: skip


class OpBuilder:
    """Base of the builders."""

    NAME = ""
    BUILD_VAR = ""
    _instead: str | None = None

    def is_compatible(self, verbose: bool = False) -> bool:
        """True if zeropp has this op."""
        return self._instead is not None

    def load(self, verbose: bool = True) -> Any:
        raise not_built(f"op {self.NAME!r} as a module", self._instead or "run without it")

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """Return the version of a kernel compiler that is not needed here."""
        return 0, 0

    def builder_name(self) -> str:
        return type(self).__name__


BUILDERS: dict[str, type[OpBuilder]] = {
    name: type(
        name,
        (OpBuilder,),
        {"NAME": op, "BUILD_VAR": f"DS_BUILD_{op.upper()}", "_instead": instead, "_zeropp_instead": (op, instead)},
    )
    for name, (op, instead) in _OPS.items()
}
ALL_OPS = {one.NAME: one() for one in BUILDERS.values()}
compatible_ops = {name: one.is_compatible() for name, one in ALL_OPS.items()}
installed_ops = compatible_ops
"""What is there is built: zeropp builds nothing at run time."""
globals().update(BUILDERS)


__all__ = ["ALL_OPS", "BUILDERS", "OpBuilder", "compatible_ops", "installed_ops", "is_later", "later", "not_built"]
