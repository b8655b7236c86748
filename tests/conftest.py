# SPDX-License-Identifier: Apache-2.0
"""Set up all tests: zeropp of this tree, built."""

from __future__ import annotations

import os
import sys
import zlib
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
    """Add --quick and --device, which `make test-quick` and `make test DEVICE=` pass, and --sample, which .ci/run passes."""
    parser.addoption("--quick", action="store_true", help="one test of each file: every area, in minutes")
    parser.addoption("--sample", type=int, default=1, metavar="N", help="every test, but one in N of its cases")
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
    """Keep the tests that --quick and --sample name."""
    keep(config, items, first_of_each_file(items) if config.getoption("--quick") else items)
    keep(config, items, one_in(config.getoption("--sample"), items))


def keep(config: pytest.Config, items: list[pytest.Item], chosen: list[pytest.Item]) -> None:
    """Deselect all items but the chosen ones."""
    ids = {id(item) for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in ids])
    items[:] = [item for item in items if id(item) in ids]


def first_of_each_file(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the first test of each file with the mark `quick`, or the first."""
    first: dict[Path, pytest.Item] = {}
    for item in sorted(items, key=lambda item: item.get_closest_marker("quick") is None):
        first.setdefault(item.path, item)
    return list(first.values())


def one_in(share: int, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return one in ``share`` of each test's cases, at least one. Which ones depends on the name of the test alone."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [
        item
        for name, found in cases.items()
        for item in found[zlib.crc32(name.encode()) % min(share, len(found)) :: share]
    ]


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
