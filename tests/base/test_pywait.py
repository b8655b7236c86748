# SPDX-License-Identifier: Apache-2.0
"""A wait in C sees signals, releases the lock, and leaves the handler's own exception."""

from __future__ import annotations

import importlib.util
import signal
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
import zeropp

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    sys.path.insert(0, str(ROOT))
    import setup as build

    target = tmp_path_factory.mktemp("wait_module") / "wait_module.abi3.so"
    sources = [HERE / "wait_module.c", ROOT / "csrc" / "bind" / "raise.c"]
    sources += [ROOT / "csrc" / "base" / name for name in ("status.c", "wait.c")]
    flags = [*build.COMMON, f"-DPy_LIMITED_API={build.LIMITED_API}", f"-I{sysconfig.get_paths()['include']}"]
    build.run(["cc", *flags, "-shared", "-o", str(target), *map(str, sources)])
    spec = importlib.util.spec_from_file_location("wait_module", target)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Stop(Exception):
    """The exception of the handler: not KeyboardInterrupt, to check that it is kept."""


@pytest.fixture
def alarm_raises():
    def handler(number, frame):
        raise Stop("ring")

    old = signal.signal(signal.SIGALRM, handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


def test_a_signal_ends_the_wait_with_the_handlers_exception(waiting: ModuleType, alarm_raises: None) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    started = time.monotonic()
    with pytest.raises(Stop, match="ring"):
        waiting.wait_some(20.0)
    assert time.monotonic() - started < 5


def test_ctrl_c_is_a_keyboard_interrupt(waiting: ModuleType) -> None:
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    # It is ignored where a shell started pytest in the background.
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            waiting.wait_some(20.0)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, old)


def test_a_handler_that_returns_lets_the_wait_go_on(waiting: ModuleType) -> None:
    heard = []
    old = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(zeropp.CommTimeoutError, match=r"rank 1 did not come within 0\.3 s") as raised:
            waiting.wait_some(0.3)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert heard == [signal.SIGALRM]
    assert raised.value.rank == 1


def test_other_threads_wait_and_run_meanwhile(waiting: ModuleType) -> None:
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            waiting.wait_some(0.3)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    count = 0
    while thread.is_alive():  # would stand still if the wait held the lock
        count += 1
        time.sleep(0.001)
    thread.join()
    assert count > 20
    assert [type(error) for error in ended] == [zeropp.CommTimeoutError]
