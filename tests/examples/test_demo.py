# SPDX-License-Identifier: Apache-2.0
"""The example scripts and the driver of `make demo`, as a user runs them."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import simulated

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one), "OMP_NUM_THREADS": "1"}


def demo(*arguments: str, out: Path, environment=None, **keywords) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(out), *arguments]
    everything = {**ENVIRONMENT, **(environment or {})}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=everything, stdin=subprocess.DEVNULL, **keywords
    )


def rows(out: Path) -> list[dict]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_zeropp_takes_under_ten_lines_of_difference():
    done = subprocess.run(
        ["diff", str(EXAMPLES / "ddp_gpt.py"), str(EXAMPLES / "train_gpt.py")], capture_output=True, text=True
    )
    changed = [line for line in done.stdout.splitlines() if line[:1] in "<>"]
    assert 0 < len(changed) < 10, changed


def test_demo_trains_stops_on_ctrl_c_and_goes_on(tmp_path):
    """A Ctrl-C reaches the whole process group, as at a terminal; the second run needs no answer, because there is
    no user."""
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(tmp_path), "--steps", "40"]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while len(rows(tmp_path)) < 3 and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 0, said
    assert "Traceback" not in said and "resumes it" in said, said
    stopped = json.loads((tmp_path / "run.json").read_text())
    assert stopped["state"] == "stopped" and 3 <= stopped["step"] < 40, stopped
    assert f"Stopped after step {stopped['step']} of 40" in said
    assert (tmp_path / "checkpoint" / "latest").read_text() == f"step-{stopped['step']}\n"
    before = rows(tmp_path)

    done = demo("--steps", "40", out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"Resuming the unfinished run at step {stopped['step']} (RESUME=no starts anew)" in done.stdout
    after = rows(tmp_path)
    assert after[: len(before)] == before and [row["step"] for row in after] == list(range(1, 41))
    for row in after:
        assert row.keys() == {
            "step", "loss", "tokens_per_s", "memory_bytes", "step_s", "forward_s", "backward_s", "optimizer_s",
            "params_bytes", "grads_bytes", "optimizer_bytes", "planned_bytes", "shm_bytes",
        }  # fmt: skip
        parts = row["forward_s"] + row["backward_s"] + row["optimizer_s"]
        assert 0 < parts < row["step_s"]
        held = row["params_bytes"] + row["grads_bytes"] + row["optimizer_bytes"]
        assert held == pytest.approx(row["planned_bytes"], rel=0.03) and row["shm_bytes"] > 0
        assert math.isfinite(row["loss"]) and row["tokens_per_s"] > 0
        assert len(row["memory_bytes"]) == 2 and all(one > 1 << 20 for one in row["memory_bytes"])
    assert after[-1]["loss"] < after[0]["loss"] - 1
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    for word in (
        "parameters",
        "bytes per parameter",
        "tokens/s",
        "validation loss",
        "reduce_scatter",
        "A sample, after",
    ):
        assert word in done.stdout, word
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "finished"


@pytest.mark.slow
def test_both_scripts_train_alike(tmp_path):
    """Both scripts have the same data, model and seed: the losses differ by the order of fp32 sums only, which three steps amplify
    little."""
    losses = {}
    for script in ("ddp_gpt.py", "train_gpt.py"):
        out = tmp_path / script
        done = demo("--steps", "3", "--script", script, out=out)
        assert done.returncode == 0, done.stderr
        losses[script] = [row["loss"] for row in rows(out)]
    for theirs, ours in zip(losses["ddp_gpt.py"], losses["train_gpt.py"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)


@pytest.mark.slow
def test_states_on_disk_train_alike_and_leave_nothing(tmp_path):
    """The losses are those of a run in memory, bit for bit; the bytes to and from the disk are printed beside the planned ones."""
    losses = {}
    disks = [tmp_path / "disk 0", tmp_path / "disk-1"]
    for offload, more in (("cpu", ()), ("nvme", ()), ("nvme", ("--scratch", ",".join(map(str, disks))))):
        done = demo("--steps", "3", "--offload", offload, *more, out=tmp_path / offload)
        assert done.returncode == 0, done.stderr
        losses[offload, more] = [row["loss"] for row in rows(tmp_path / offload)]
    assert len({str(seen) for seen in losses.values()}) == 1, losses
    bytes_ = 4 * json.loads((tmp_path / "nvme" / "result.json").read_text())["parameters"]
    for row in rows(tmp_path / "nvme")[1:]:
        assert 0.9 * 3 * bytes_ < row["disk_written_bytes"] < 1.1 * 3 * bytes_, (row, bytes_)
        assert 0.9 * 4 * bytes_ < row["disk_read_bytes"] < 1.1 * 7 * bytes_, (row, bytes_)
    assert "written to the disk a step" in done.stdout and "the same, planned" in done.stdout
    assert not list((tmp_path / "nvme" / "scratch").glob("zeropp-scratch-*"))
    assert [list(disk.iterdir()) for disk in disks] == [[], []]


def test_a_model_larger_than_memory(tmp_path):
    """The memory is small, so that the case fits a test: states exceed it, every figure stands beside the planned one, and
    nothing is left on the disk."""
    done = demo("--offload", "nvme", "--preset", "large", "--memory", "32M", "--steps", "3", out=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = rows(tmp_path)
    assert len(seen) == 3 and all(math.isfinite(row["loss"]) for row in seen)
    for row in seen:
        assert row["disk_written_bytes"] == pytest.approx(row["planned_written_bytes"], rel=0.05), row
        # Less than planned where a slice is still in memory; more where a rank is late, and reads what the other one has given back:
        # at most each unit twice in both passes, 28 bytes a parameter of 16, in the first step 20 of 12. The machine's load decides.
        assert 0.8 * row["planned_read_bytes"] < row["disk_read_bytes"] < 1.8 * row["planned_read_bytes"], row
        assert row["step_s"] > 0 and 0 < row["of_disk_limit"] < 2 and row["waited_s"] >= 0, row
    assert "states of 0.05 GiB, memory of 0.03 GiB" in done.stdout, done.stdout
    for line in done.stdout.splitlines():
        if " on disk: " in line:
            planned, held = (float(word) for word in line.replace(",", "").split() if word[:1].isdigit())
            assert held == pytest.approx(planned, rel=0.03), line
    assert sorted(one.name for one in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_half_of_the_free_disk_is_not_taken_unasked(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    memory = max(1, int(free * 0.75 / 12 * 16 / 1.25) >> 30)  # three quarters of what is free
    left = tmp_path / "scratch" / "zeropp-scratch-0123" / "rank-0"  # by a run that was killed
    left.mkdir(parents=True)
    (left / "states").write_bytes(b"x" * 4096)
    done = demo("--offload", "nvme", "--preset", "large", f"--memory={memory}G", "--yes=0", out=tmp_path)
    assert done.returncode == 2 and "more than half; YES=1 allows it" in done.stderr, done.stderr
    assert not left.parent.exists(), "what nobody uses does not count as taken"


def test_demo_trains_on_a_simulated_gpu(tmp_path):
    """Every process has the device as one that a package brings: torch loads what the entry points "torch.backends" name."""
    simulated("sim")
    package = tmp_path / "package"
    (package / "simulated-0.dist-info").mkdir(parents=True)
    (package / "simulated-0.dist-info" / "METADATA").write_text("Name: simulated\nVersion: 0\n")
    (package / "simulated-0.dist-info" / "entry_points.txt").write_text("[torch.backends]\nsim = simulated:load\n")
    # Tied parameters stay tied in model.to(device), as on CUDA: torch makes new ones for devices of this kind otherwise.
    swaps = "torch.__future__.set_swap_module_params_on_conversion(True)"
    (package / "simulated.py").write_text(f"import torch\n\n\ndef load():\n    import sim\n    {swaps}\n")
    path = os.pathsep.join([str(package), ENVIRONMENT["PYTHONPATH"]])
    losses = {}
    for device in ("sim", "cpu"):
        out = tmp_path / device
        done = demo(f"--device={device}", "--steps=3", "--ranks=2", out=out, environment={"PYTHONPATH": path})
        assert done.returncode == 0 and f"DEVICE={device} RANKS=2" in done.stdout, done.stderr
        losses[device] = [row["loss"] for row in rows(out)]
    # Both compute the same in fp32, the device by other operators: sums of at most 512 terms.
    assert len(losses["sim"]) == 3 and losses["sim"] == pytest.approx(losses["cpu"], rel=512 * 2**-24)


@pytest.mark.parametrize("large", [[], ["--offload=nvme", "--preset=large", "--memory=32M"]])
def test_two_runs_in_one_folder_are_kept_apart(tmp_path, large):
    """The second would write the first one's metrics and checkpoints, and remove its scratch files at its end."""
    held = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = demo("--steps=1", *large, out=tmp_path)
    finally:
        os.close(held)
    assert done.returncode == 2 and f"{tmp_path}: another run writes there" in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--offload=nvme", "--preset=large", "--memory=4k"], "MEMORY=4k: wanted at least 16M, as 512M or 24G"),
        pytest.param(
            ["--offload=nvme", "--preset=large", "--memory=900000G"],
            "GiB free, and the states of this model want",
            marks=pytest.mark.slow,
        ),
        (
            ["--offload=nvme", "--preset=large", "--memory=64M", "--resume=yes"],
            "RESUME=yes: this run keeps no checkpoint",
        ),
        (["--offload=nvme", "--scratch=/a,,/b"], "SCRATCH=/a,,/b: wanted folders, each once"),
        (["--offload=nvme", "--scratch=/a,/a"], "SCRATCH=/a,/a: wanted folders, each once"),
        (["--offload=nvme", "--scratch=/a,{out}"], "is the run's own folder, which it has locked; wanted others"),
        (["--scratch=/a"], "SCRATCH=/a: only OFFLOAD=nvme has files to put there"),
        (["--memory=64M"], "MEMORY=64M: only OFFLOAD=nvme PRESET=large chooses its model by it"),
        (["--offload=cpu", "--script=ddp_gpt.py"], "OFFLOAD=cpu: ddp_gpt.py trains without zeropp"),
        (["--offload=disk"], "OFFLOAD=disk: wanted one of none, cpu, nvme"),
        (["--device=tpu"], "DEVICE=tpu: torch sees no such device here; leave DEVICE empty to train on the CPU"),
        (["--preset=tiny"], "PRESET=tiny: wanted one of small, base, large"),
        (["--steps=0"], "STEPS=0: wanted a whole number >= 1"),
        (["--ranks=two"], "RANKS=two: wanted a whole number >= 1"),
        (["--data=/nowhere"], "DATA=/nowhere: no such file or folder"),
        (
            ["--offload=nvme", "--preset=large", "--memory=32M", "--data=/nowhere"],
            "make demo: DATA=/nowhere: no such file or folder",
        ),
        (["--yes=maybe"], "YES=maybe: wanted one of 1, yes"),
        (["--resume=maybe"], "RESUME=maybe: wanted one of yes, no, ask"),
    ],
)
def test_what_cannot_be_names_the_variable(arguments, says, tmp_path):
    done = demo(*(one.replace("{out}", str(tmp_path)) for one in arguments), out=tmp_path)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr


def unfinished(out: Path, **changes) -> None:
    """Return the folder that a stopped run of two ranks leaves."""
    facts = {
        "preset": "small",
        "data": None,
        "ranks": 2,
        "script": "train_gpt.py",
        "steps": 40,
        "state": "stopped",
        "step": 7,
    }
    (out / "checkpoint" / "step-7").mkdir(parents=True)
    (out / "run.json").write_text(json.dumps({**facts, **changes}))


@pytest.mark.parametrize(
    "changes, arguments, says",
    [
        ({"ranks": 3}, [], "has RANKS=3, this one 2; give the same to resume it, or RESUME=no"),
        pytest.param({"preset": "base"}, [], "has PRESET=base, this one small", marks=pytest.mark.slow),
        pytest.param({}, ["--steps=7"], "STEPS=7: the unfinished run is at step 7 already", marks=pytest.mark.slow),
    ],
)
def test_another_run_in_the_way_is_not_resumed_nor_replaced_unasked(tmp_path, changes, arguments, says):
    unfinished(tmp_path, **changes)
    done = demo(*(one.replace("{out}", str(tmp_path)) for one in arguments), out=tmp_path)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert (tmp_path / "checkpoint" / "step-7").exists()


def test_too_little_text_is_refused(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("hello\n" * 10)
    done = demo(f"--data={short}", "--steps=1", out=tmp_path / "out")
    assert done.returncode == 1 and "too little to learn from" in done.stderr + done.stdout


@pytest.mark.slow
def test_the_small_preset_learns_within_five_minutes(tmp_path):
    """2.42 nats a byte is the bigram entropy of this text: below it the model uses more than the last byte."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=900, env=ENVIRONMENT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    took = time.monotonic() - begun
    assert done.returncode == 0, done.stderr
    loss = json.loads((tmp_path / "result.json").read_text())["validation_loss"]
    assert loss < 2.2 and took < 300, (loss, took)
