# SPDX-License-Identifier: Apache-2.0
"""``deepspeed.utils.logging``: its logger, which is Python's of the name "DeepSpeed", and messages of some ranks alone."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("DeepSpeed")
logger.setLevel(logging.INFO)  # as DeepSpeed; Python prints less than a warning only after a configuration of logging

log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


class LoggerFactory:
    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        if name is None:
            raise ValueError("create_logger: name is None; wanted the logger's name")
        made = logging.getLogger(name)
        made.setLevel(level)
        return made


def get_dist_msg(message: str, ranks: Any = None) -> str | None:
    """The message with its rank; None on a rank that is not among ``ranks`` ([-1]: all). Without a process group it is never None."""
    if not dist.is_initialized():
        return f"[Rank -1] {message}"
    mine = dist.get_rank()
    return f"[Rank {mine}] {message}" if ranks and (ranks[0] == -1 or mine in ranks) else None


def log_dist(message: str, ranks: Any = None, level: int = logging.INFO) -> None:
    said = get_dist_msg(message, ranks)
    if said is not None:
        logger.log(level, said)


@functools.cache
def _once(message: str, ranks: Any, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Any = None, level: int = logging.INFO) -> None:
    _once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def warning_once(message: str, *args: Any) -> None:
    logger.warning(message, *args)


logger.warning_once = warning_once  # type: ignore[attr-defined]
logger.log_dist_once = log_dist_once  # type: ignore[attr-defined]


def print_dist(message: str, ranks: Any = None) -> None:
    said = get_dist_msg(message, ranks)
    if said is not None:
        print(said)


def print_json_dist(message: dict[str, Any], ranks: Any = None, path: Any = None) -> None:
    if get_dist_msg("", ranks) is not None:
        message["rank"] = dist.get_rank() if dist.is_initialized() else -1
        Path(path).write_text(json.dumps(message), encoding="utf-8")


def print_configuration(args: Any, name: str) -> None:
    logger.info("%s:", name)
    for key in sorted(vars(args)):
        logger.info("  %s %s %s", key, "." * (29 - len(key)), getattr(args, key))


def get_log_level_from_string(log_level_str: str) -> int:
    if log_level_str.lower() not in log_levels:
        raise ValueError(f"log level {log_level_str!r} is unknown; wanted one of {', '.join(log_levels)}")
    return int(log_levels[log_level_str.lower()])


def set_log_level_from_string(log_level_str: str, custom_logger: Any = None) -> None:
    wanted = get_log_level_from_string(log_level_str)
    chosen = logger if custom_logger is None else custom_logger
    for one in (chosen, *chosen.handlers):
        one.setLevel(wanted)


def get_current_level() -> int:
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    return get_current_level() <= get_log_level_from_string(max_log_level_str)
