# SPDX-License-Identifier: Apache-2.0
"""Names of DeepSpeed whose feature zeropp does not have yet: each can be imported, compared, subclassed and asked about with
isinstance, and raises a sentence when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeropp.errors import ConfigError


def not_built(what: str, instead: str) -> ConfigError:
    return ConfigError(f"deepspeed's {what} is not supported by zeropp; {instead}")


class _Later(type):
    """A class whose instances, and whose own functions, do not exist yet."""

    _zeropp_sentence: tuple[str, str]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise not_built(*cls._zeropp_sentence)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        return _function(name, f"{cls._zeropp_sentence[0]}.{name}", cls._zeropp_sentence[1])


def later(full_name: str, instead: str) -> Any:
    """Return a stand-in for a name: a class where DeepSpeed has one, judged by its first letter, else a function."""
    what, name = full_name.removeprefix("deepspeed."), full_name.rpartition(".")[2]
    if name.lstrip("_")[:1].isupper():
        return _Later(name, (), {"__doc__": f"Not built yet; {instead}.", "_zeropp_sentence": (what, instead)})
    return _function(name, what, instead)


def _function(name: str, what: str, instead: str) -> Callable[..., Any]:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise not_built(what, instead)

    raises.__name__ = raises.__qualname__ = name
    raises.__doc__ = f"Not built yet; {instead}."
    raises._zeropp_sentence = (what, instead)  # type: ignore[attr-defined]
    return raises


def is_later(value: Any) -> bool:
    """True for what :func:`later` made."""
    return isinstance(value, _Later) or "_zeropp_sentence" in getattr(value, "__dict__", {})


__all__ = ["is_later", "later", "not_built"]
