# SPDX-License-Identifier: Apache-2.0
"""The names that other projects' scripts read from deepspeed (projects.json), under ``python -m zeropp run``."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from warm import launch

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    result = tmp_path_factory.mktemp("names") / "found.json"
    done = launch(1, HERE / "hide.py", "run", HERE / "names_script.py", result, timeout=200, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads(result.read_text()), "printed": done.stdout}


def test_each_name_works_or_raises_a_sentence_as_recorded(found):
    assert found["wrong"] == {}
    names = json.loads((HERE / "projects.json").read_text())["names"]
    assert len(names["works"]) > 200 and not set(names["works"]) & set(names["sentence"])


def test_a_name_that_is_nowhere_is_an_error_that_says_whose_it_is(found):
    wanted = (
        ("ModuleNotFoundError", "deepspeed.utils.RepeatingLoadr", "did you mean deepspeed.utils.RepeatingLoader"),
        ("ModuleNotFoundError", "deepspeed.runtime.zero.stage4", "did you mean deepspeed.runtime.zero.stage3"),
        ("AttributeError", "deepspeed.inititalize", "did you mean deepspeed.initialize"),
        (
            "AttributeError",
            "deepspeed.get_accelerator().divice_name",
            "did you mean deepspeed.get_accelerator().device_name",
        ),
        ("ModuleNotFoundError", "deepspeed.FusedAdam", "deepspeed.ops.adam.FusedAdam is there"),
    )
    for (kind, name, hint), said in zip(wanted, found["said"], strict=True):
        assert said.startswith(
            f"{kind}: {name}: zeropp stands for deepspeed in this process, and has no such name; {hint}"
        ), said
    assert found["hasattr"] == [False, False]


def test_the_accelerator_is_whole(found):
    assert found["accelerator"] == {
        "names": ["cpu", "cpu", "cpu", "cpu", "gloo"], "counts": [0, True], "available": True, "drawn": True,
        "synchronous": [True, True, True], "visible": {"CUDA_VISIBLE_DEVICES": "1,3"}, "backend": "eager", "inside": "cpu", "held": True,
        "triton": False, "bf16": True, "seed": True,
    }  # fmt: skip


def test_the_small_parts_do_what_they_promise(found):
    parts = found["parts"]
    host, device, largest = parts.pop("needs")
    # 2 bytes a parameter, 2 a gradient, 4 of master values and 8 of Adam's states, split over 4 ranks of the host; and buffers.
    assert 16e9 <= host < 20e9 and device == 0 and 2e8 <= largest < 2.01e8
    assert parts.pop("rates") == pytest.approx([0.0, 0.02, 0.04, 0.06, 0.08, 0.1])
    assert parts == {
        "meta": ["meta", "torch.float16"], "default": "torch.float32", "loader": [1, 2, 1, 2, 1], "enum": True, "checkpoint": True,
        "configured": [False, True],
    }  # fmt: skip
    assert "1073M total params" in found["printed"] and "offload_param=nvme, offload_optimizer=nvme" in found["printed"]


def test_the_table_in_the_docs_is_up_to_date():
    tool = importlib.util.spec_from_file_location("deepspeed_table", HERE.parents[1] / "scripts" / "deepspeed_table.py")
    module = importlib.util.module_from_spec(tool)
    tool.loader.exec_module(module)
    data = json.loads((HERE / "projects.json").read_text())
    text = module.PAGE.read_text()
    assert module.page(text, data) == text, "run python scripts/deepspeed_table.py"
    tests = {row["test"] for rows in data["projects"].values() for row in rows.values() if "test" in row}
    assert all((HERE / "scripts" / f"{name}.py").is_file() for name in tests)


def test_the_accelerator_of_a_machine_with_cuda(found):
    """Check what works without a GPU, and that every name of the CPU's accelerator exists."""
    assert found["cuda"] == {
        "lacks": [], "names": ["cuda", "cuda:1", "cuda:1", "nccl", False, ["NCCL"]], "same": [True, True], "on": False,
    }  # fmt: skip
