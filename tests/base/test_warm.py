# SPDX-License-Identifier: Apache-2.0
"""A process that a warm one forked is what a cold start would have made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
import warm

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TELL = """
import json, os, sys
assert "torch" in sys.modules and "zeropp" not in sys.modules
print(json.dumps([os.environ["RANK"], os.environ.get("ONLY_HERE"), sys.argv[1:], os.getcwd(), hash("a string"), __name__]))
print("to the other stream", file=sys.stderr)
assert os.getpid() > 1 and len(os.listdir("/proc/self/fd")) == 4, os.listdir("/proc/self/fd")
"""


def test_arguments_environment_folder_and_streams(tmp_path):
    done = warm.launch(2, "-c", TELL, "a", 1, env={**ENVIRONMENT, "ONLY_HERE": "x"}, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "to the other stream\n" * 2
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for rank, row in enumerate(rows):
        assert row[:4] + row[5:] == [str(rank), "x", ["a", "1"], str(tmp_path), "__main__"]
    assert rows[0][4] != rows[1][4], "ranks must not agree on the order of sets by chance"


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("import sys; sys.exit(7)", 7),
        ("raise ValueError('no')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
        ("import threading, time, os; threading.Thread(target=lambda: (time.sleep(0.1), os._exit(3))).start()", 3),
    ],
)
def test_how_it_ended(code, wanted, tmp_path):
    done = warm.launch(1, "-c", code, env=ENVIRONMENT, timeout=60)
    assert done.returncode == wanted and ("ValueError: no" in done.stderr) == (wanted == 1), done.stderr


def test_the_first_that_fails_ends_the_others_and_the_limit_all():
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(4)\nprint('here', flush=True)\ntime.sleep({})"
    with pytest.raises(subprocess.TimeoutExpired) as error:
        warm.launch(1, "-c", code.format(100), env=ENVIRONMENT, timeout=0.5)
    assert error.value.output == "here\n"
    assert warm.launch(2, "-c", code.format(0.2), env=ENVIRONMENT, timeout=60).returncode == 4


def test_signals_reach_it_and_a_variable_read_early_starts_it_cold(tmp_path):
    code = "import os, sys, time\nprint(os.environ.get('OMP_NUM_THREADS'), 'torch' in sys.modules, flush=True)\ntime.sleep(60)"
    for threads, loaded in (("1", True), ("2", False)):
        with (tmp_path / threads).open("w+") as out:
            process = warm.start(["-c", code], env={**ENVIRONMENT, "OMP_NUM_THREADS": threads}, stdout=out, stderr=out)
            deadline = time.monotonic() + 60
            while not (tmp_path / threads).read_text() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == -signal.SIGTERM
        assert (tmp_path / threads).read_text() == f"{threads} {loaded}\n"


def test_one_that_cannot_fork_leaves_a_cold_start(tmp_path, monkeypatch, capfd):
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()"
    )
    monkeypatch.setitem(warm.PRELOADED, "threads", ["starts_a_thread"])
    monkeypatch.chdir(tmp_path)
    done = warm.launch(
        1, "-c", "import sys; print('torch' in sys.modules)", env=ENVIRONMENT, timeout=60, kind="threads"
    )
    assert done.stdout == "False\n" and done.returncode == 0, done.stderr
    assert "2 threads after importing starts_a_thread" in capfd.readouterr().err
