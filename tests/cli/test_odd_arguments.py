# SPDX-License-Identifier: Apache-2.0
"""Every command with odd arguments: one sentence that names what is wrong, the documented status, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from zeropp.cli import main

FACTORY = """
import torch
def good(): return torch.nn.Linear(200, 200)
def needs(width, depth=3, *more): return torch.nn.Linear(width, 2)
def boom(): raise KeyError("inside")
def none(): return None
def empty(): return torch.nn.Sequential()
model = torch.nn.Linear(2, 2)
"""
GOOD = "zeropp_test_factory:good"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "zeropp_test_factory.py").write_text(FACTORY)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": "x"}')
    (tmp_path / "ck" / "step-1").mkdir(parents=True)
    (tmp_path / "ck" / "step-1" / "manifest.json").write_text("[]")
    return tmp_path


def status_of(command: list[str]) -> int:
    try:
        return main(command)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


@pytest.mark.parametrize(
    "more",
    [
        ["--tiers", "optimizer=nvme", GOOD],
        ["--tiers", "optimizer=nvme", "params=cpu", GOOD],
        ["--comm", "grads=int8", GOOD],
        ["--tiers", "optimizer=nvme", "--paths", "/tmp", GOOD],
        [GOOD, "--tiers", "optimizer=nvme"],
    ],
)
def test_the_model_of_estimate_may_stand_anywhere(more, capsys):
    assert status_of(["estimate", "--ranks", "2", "--json", *more]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 40200


CASES: list[tuple[list[str], int, str]] = [
    (["estimate", "--ranks", "2", "--tiers", "optimizer=nvme"], 2, "MODEL is missing; wanted a Hugging Face folder"),
    (["estimate", GOOD], 2, "neither ranks nor mesh is given"),
    (["estimate", GOOD, "--ranks", "0"], 2, "argument --ranks: '0' is not allowed; wanted a whole number above 0"),
    (["estimate", GOOD, "--ranks", "9" * 30], 2, "wanted a whole number above 0"),
    (["estimate", GOOD, "--ranks", "2", "--tiers", "optimizer"], 2, "--tiers optimizer: '' is not allowed; wanted optimizer=device"),
    (["estimate", GOOD, "--ranks", "2", "--comm", "grads=int3"], 2, "--comm grads=int3: 'int3' is not allowed; wanted grads=exact"),
    (["estimate", GOOD, "--ranks", "2", "--tokens", "9", "--tflops", "inf"], 2, "tflops inf is not allowed"),
    (["estimate", "zeropp_test_factory:needs", "--ranks", "2"], 2, "'needs' needs 1 argument (width); wanted a function without arguments"),
    (["estimate", "torch.nn:Linear", "--ranks", "2"], 2, "'Linear' needs 2 arguments (in_features, out_features); wanted"),
    (["estimate", "zeropp_test_factory:boom", "--ranks", "2"], 2, "zeropp_test_factory:boom: 'boom' raised KeyError: 'inside'"),
    (["estimate", "zeropp_test_factory:none", "--ranks", "2"], 2, "'none' returned None; wanted a torch.nn.Module"),
    (["estimate", "zeropp_test_factory:empty", "--ranks", "2"], 2, "estimate: Sequential has no parameters, so there is nothing"),
    (["estimate", "zeropp_test_factory:model", "--ranks", "2"], 2, "a Linear; wanted a function without arguments that returns"),
    (["estimate", "broken:f", "--ranks", "2"], 2, "broken:f: importing broken raised SyntaxError"),
    (["estimate", ".relative:f", "--ranks", "2"], 2, "wanted package.module:function"),
    (["config", "empty"], 2, "config: empty: line 1, column 1: not JSON"),
    (["config", "binary"], 2, "config: binary: cannot be read as a configuration"),
    (["config", "none.json"], 2, "No such file"),
    (["config", "{}", "--ranks", "-3"], 2, "argument --ranks: '-3' is not allowed"),
    (["verify", "none"], 2, "no checkpoint there (no such folder)"),
    (["verify", "empty"], 2, "verify: empty: no checkpoint there"),
    (["export", "none", "out"], 1, "no checkpoint there (no such folder)"),
    (["export", "ck", "out", "--file-bytes", "0"], 2, "export: file_bytes 0 is not allowed"),
    (["bench-io", "none"], 2, "python -m zeropp bench-io: none is not a folder"),
    (["bench-io", "ck", "ck"], 2, "each folder once"),
    (["bench-io", "a\0b"], 2, "a folder's name"),
    (["bench-io", "/proc"], 1, "python -m zeropp bench-io: /proc has 0 bytes free"),
    (["doctor"], 2, "no ranks (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set); start it as"),
    (["doctor", "--factor", "nan"], 2, "--factor nan is not allowed; wanted a number above 1"),
    (["doctor", "--timeout", "-1"], 2, "--timeout -1.0 is not allowed"),
    (["doctor", "--quick"], 2, "--quick is for GPUs; name them, as in --device cuda"),
    (["doctor", "--device", "cpu"], 2, "--device cpu is not allowed; wanted a GPU, such as cuda or cuda:0"),
    (["doctor", "--device", "nonsense"], 2, "python -m zeropp doctor: "),
    # `run` says so before it makes names for this process.
    (["run", "none.py"], 2, "python -m zeropp run: 'none.py': there is no such file; wanted a script"),
    (["run", "-m", "no_such_module_here"], 2, "'no_such_module_here': there is no such module"),
    (["env", "x"], 2, "unrecognized arguments: x"),
    (["nonsense"], 2, "invalid choice: 'nonsense'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "status", "says"), CASES, ids=[" ".join(case[0])[:60].replace("\0", "0") for case in CASES]
)
def test_one_sentence(command, status, says, capsys):
    assert status_of(command) == status
    said = capsys.readouterr()
    assert says in said.err and not said.out, said
    sentence = said.err.splitlines()[-1]
    assert sentence.startswith(("python -m zeropp", "zeropp")), said.err


def test_a_module_that_is_not_in_its_package():
    """In a process of its own: `run` has made its names by then, because finding the module imports its package."""
    command = [sys.executable, "-m", "zeropp", "run", "-m", "json.nothing.there"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and not done.stdout, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "python -m zeropp run: 'json.nothing.there': there is no such module"
    )


@pytest.mark.parametrize("model", ["config.json", "empty", "ck", "/none/there", ""])
def test_a_model_that_transformers_cannot_make(model, capsys):
    pytest.importorskip("transformers")
    assert status_of(["estimate", model, "--ranks", "2"]) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("python -m zeropp estimate: ") and "wanted a Hugging Face folder" in said


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "x"}, "RANK=x is not allowed; wanted a whole number, 0 to"),
        ({"RANK": "5"}, "RANK=5 is not allowed with WORLD_SIZE=2; wanted 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not allowed; wanted a whole number, 1 to"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not allowed"),
    ],
)
def test_a_wrong_place_of_doctor(variables, says, capsys, monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for name, value in {**place, **variables}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 2
    assert says in capsys.readouterr().err


def test_a_section_of_a_wrong_kind(capsys):
    assert main(["config", '{"optimizer": {"type": "Adam", "params": 3}}']) == 1
    assert 'optimizer.params: 3 is not allowed; wanted an object, as in {"lr": 1e-3}' in capsys.readouterr().out
