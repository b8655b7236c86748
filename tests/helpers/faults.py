# SPDX-License-Identifier: Apache-2.0
"""Faults for tests: a full disk, and a child process that may be killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Refuse to let a file of this process grow beyond a size, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _in_one_thread(work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # torch's threads do not live on in a fork
    work(*arguments)


def exit_codes(work: Callable[..., Any], *each: tuple[Any, ...]) -> list[int | None]:
    """Run a function in forked processes, one for each tuple of arguments; return how they ended."""
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_in_one_thread, args=(work, arguments)) for arguments in each]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    return [child.exitcode for child in children]
