# SPDX-License-Identifier: Apache-2.0
"""`python -m zeropp verify` and `export`: what they print, their exit status, and what they write."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zeropp
from safetensors.torch import load_file
from zeropp.checkpoint import offline
from zeropp.cli import main
from zeropp.errors import CheckpointError, ConfigError

_path = Path(__file__).parents[1] / "checkpoint" / "models.py"
_spec = importlib.util.spec_from_file_location("checkpoint_models", _path)
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 1 and 2, bf16 with fp32 masters; and the model."""
    model, optimizer, scheduler = models.make(precision="bf16")
    for step in (1, 2):
        models.train(model, optimizer, scheduler, step - 1, step)
        extra = {"seen": torch.ones(3)}  # a name that the model has, too
        zeropp.save(tmp_path / "ckpt", model, optimizer, step=step, scheduler=scheduler, extra=extra)
    return tmp_path / "ckpt", model, optimizer


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[700] ^= 4
    path.write_bytes(data)


def test_verify_says_what_is_good_and_what_is_not(saved, capsys):
    root, _, _ = saved
    assert main(["verify", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"good    {root}/step-2 (latest)", f"good    {root}/step-1"]
    assert lines[0].endswith("bytes of 1 rank, stage 3")
    damage(root / "step-1" / "rank-00000.safetensors")
    assert main(["verify", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("good") and lines[1].startswith(
        f"damaged {root}/step-1: {root}/step-1/rank-00000.safetensors: damaged between offset 0 and"
    )
    assert main(["verify", str(root / "step-2"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["good"] is True
    assert main(["verify", str(root / "nothing")]) == 2
    assert (
        "python -m zeropp verify: " in (said := capsys.readouterr().err)
        and "no checkpoint there (no such folder)" in said
    )


def test_export_writes_what_the_model_holds(saved, tmp_path, capsys):
    root, model, _ = saved
    whole = zeropp.full_state_dict(model)
    assert main(["export", str(root), str(tmp_path / "out")]) == 0
    assert "step-2: " in capsys.readouterr().out
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(whole) - {"head.weight"}  # tied: once
    for name, values in written.items():
        assert values.dtype == whole[name].dtype and torch.equal(values, whole[name]), name
    zeropp.export(model, tmp_path / "online")
    again = load_file(tmp_path / "online" / "model.safetensors")
    assert all(torch.equal(values, again[name]) for name, values in written.items())
    offline.export(root, tmp_path / "master", dtype="fp32")
    for name, values in load_file(tmp_path / "master" / "model.safetensors").items():
        assert values.dtype == (torch.float32 if values.is_floating_point() else torch.int64)
        assert torch.equal(values.to(whole[name].dtype), whole[name])


def test_export_of_many_files_passes_over_what_is_damaged(saved, tmp_path, capsys):
    root, _, _ = saved
    damage(root / "step-2" / "rank-00000.safetensors")
    assert main(["export", str(root), str(tmp_path / "out"), "--file-bytes", "1500"]) == 0
    said = capsys.readouterr()
    assert f"{root}/step-2 is damaged and was passed over" in said.err and "step-1: " in said.out
    other, _, _ = models.make(precision="bf16")
    zeropp.load_full_state_dict(other, tmp_path / "out")
    third, _, _ = models.make(precision="bf16")
    zeropp.load(root / "step-1", third)
    ours, theirs = zeropp.full_state_dict(other), zeropp.full_state_dict(third)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]["seen"]


def test_export_refuses(saved, tmp_path, capsys):
    root, _, _ = saved
    for step in (1, 2):
        damage(root / f"step-{step}" / "rank-00000.safetensors")
    assert main(["export", str(root), str(tmp_path / "out")]) == 1
    assert (
        "none of 2 checkpoints is good: step-2 is damaged: " in capsys.readouterr().err
        and not (tmp_path / "out").exists()
    )
    with pytest.raises(ConfigError, match=r"dtype 'int8' is not allowed"):
        offline.export(root, tmp_path / "out", dtype="int8")
    with pytest.raises(CheckpointError, match="no such folder"):
        offline.export(root / "nothing", tmp_path / "out")


def test_export_needs_a_few_blocks_of_memory(tmp_path):
    """A parameter of 192 MB, in a process that may grow by less than that."""
    model = torch.nn.Linear(6000, 8000, bias=False)
    model, _ = zeropp.prepare(model)
    zeropp.save(tmp_path / "ckpt", model, step=1)
    script = (
        "import resource, sys, zeropp\nfrom zeropp.checkpoint import offline\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "offline.export(sys.argv[1], sys.argv[2])\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "ckpt"), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100, f"{done.stdout} MiB"
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 192_000_000
