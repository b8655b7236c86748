# SPDX-License-Identifier: Apache-2.0
"""Set up all tests: zeropp of this tree, built."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Tests start processes of their own: they, too, must find this tree, installed or not.
OURS = [str(ROOT / folder) for folder in ("python", "tests", "tests/helpers", "tests/sim")]
sys.path[:0] = OURS
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*OURS, os.environ.get("PYTHONPATH", "")]))

import ranks  # noqa: E402
from ranks import each_rank, launched  # noqa: E402, F401  (fixtures)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --quick and --device, which `make test-quick` and `make test DEVICE=` pass."""
    parser.addoption("--quick", action="store_true", help="one test of each file: every area, in minutes")
    parser.addoption(
        "--device",
        default="",
        choices=["", "cpu", "sim", "sim-lazy", "sim-offload"],
        help="of all tests of ranks (ranks.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let the tests, which are imported later, know the device."""
    ranks.DEVICE = config.getoption("--device")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one test of each file under --quick: the first with the mark `quick`, or the first."""
    if not config.getoption("--quick"):
        return
    first: dict[Path, pytest.Item] = {}
    for item in sorted(items, key=lambda item: item.get_closest_marker("quick") is None):
        first.setdefault(item.path, item)
    kept = [item for item in items if item in first.values()]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_sessionstart(session: pytest.Session) -> None:
    """Stop once where the C module is missing, because every test would fail with a long traceback."""
    if not (ROOT / "python" / "zeropp" / "_C.abi3.so").exists():
        raise pytest.UsageError("zeropp._C is not built: make test, or python setup.py build_ext --inplace")


# torchrun gives its ranks this machine's name as the address to meet at, and not every machine can resolve its own name: ranks
# would look it up until their test's time limit.
os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the repository."""
    return ROOT
