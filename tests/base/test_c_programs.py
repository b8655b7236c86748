# SPDX-License-Identifier: Apache-2.0
"""Every C test program, plain and with asserts on; `make sanitize` runs the same under sanitizers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

RUN = Path(__file__).resolve().parents[1] / "c" / "run.py"


def load_runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zeropp_c_tests", RUN)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


runner = load_runner()


@pytest.fixture(scope="module")
def flavor(request: pytest.FixtureRequest):
    made = runner.Flavor("plain")
    if request.config.getoption("--quick"):  # only the layers below the program that is kept
        runner.PRODUCT, made.product = ("base", "aio"), made.product.with_name("quick.a")
    made.compile_product()
    return made


#: Arguments of the programs that run a sample here: how many seeds.
SAMPLES = {"test_zero_schedules": ["400"]}


@pytest.mark.parametrize("source", runner.programs(), ids=lambda path: path.stem)
def test_c_program(flavor, source: Path) -> None:
    result = runner.run_program("plain", flavor.link(source), SAMPLES.get(source.stem, []))
    assert result.ok, result.output


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_c_program_whole(flavor, name: str) -> None:
    (source,) = (path for path in runner.programs() if path.stem == name)
    result = runner.run_program("plain", flavor.link(source), [])
    assert result.ok, result.output
