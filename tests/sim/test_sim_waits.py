# SPDX-License-Identifier: Apache-2.0
"""Each place where the coordinator, or an exchange of rows, waits for an accelerator is in a table, with the test that leaves the wait
out and then fails.

A wait without such a test may be missing one day without a sign of it, or may be there without need.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import test_sim_offload
import test_sim_on_device

ROOT = Path(__file__).resolve().parents[2]
CALL = re.compile(
    r"\b(zpp_event_sync|zpp_stream_wait|zpp_counters_await(?:_some)?|await_members|zpp_stream_await(?:_all)?)\("
)
FUNCTION = re.compile(r"^[a-z][\w ]*[ *](\w+)\([^;]*$")

ON_HOST = "of operations on the host alone: tests/c/test_zero_schedules.c"
AT_END = "of memory that is about to be freed; the simulated driver reports work on freed memory"
PLACES: dict[tuple[str, str], tuple[str, ...]] = {
    ("csrc/base/wrap.c", "wait_for_use"): ("a gather waits for its memory",),
    ("csrc/zero/unit.c", "wait_gather"): ("compute waits for ready",),
    ("csrc/zero/placement/on_device.c", "await_stepped"): (
        "gathers wait for stepped",
        "a gather waits for a step of this rank",
    ),
    ("csrc/zero/placement/on_device.c", "begin_writes"): (
        "a step waits for read",
        "compute waits for a gather by NCCL",
    ),
    ("csrc/zero/placement/on_device.c", "wait_for_compute"): ("the shard of a device waits for the values at set-up",),
    ("csrc/zero/placement/on_device.c", "collect"): ("compute waits for copies after a step",),
    ("csrc/zero/placement/on_device.c", "make_exact"): (
        "exact values wait for computation",
        "computation waits for exact values",
    ),
    ("csrc/zero/placement/offloaded.c", "zpp_offloaded_keep_shard"): ("the shard waits for the values at set-up",),
    ("csrc/zero/placement/offloaded.c", "settle"): ("the step waits for gathers",),
    ("csrc/zero/placement/offloaded.c", "end_reads"): ("a unit without a gradient waits for its gathers",),
    ("csrc/zero/placement/offloaded.c", "copy_over"): (
        "copies after a step wait for computation",
        "computation waits for copies after a step",
    ),
    ("csrc/zero/placement/offloaded_net.c", "free_staging"): ("a staging waits for the copy from it to the GPU",),
    ("csrc/zero/placement/offloaded_net.c", "copy_up"): (
        "the copy up from other hosts waits for the last use of the memory",
    ),
    ("csrc/zero/placement/offloaded_net.c", "wait_gather"): ("computation waits for the copy up from other hosts",),
    ("csrc/zero/reduce_device.c", "settle"): ("a bucket waits for taken",),
    ("csrc/zero/reduce_device.c", "add"): ("sums wait for written",),
    ("csrc/zero/reduce_device.c", "copy"): ("stage 0: copies wait for taken",),
    ("csrc/zero/reduce_device.c", "finish"): ("a step waits for the sums",),
    ("csrc/zero/by_nccl.c", "settle"): ("a bucket waits for its exchange",),
    ("csrc/zero/by_nccl.c", "send"): ("an exchange waits for the bucket",),
    ("csrc/zero/by_nccl.c", "finish"): ("stage 0: compute waits for the sums of all",),
    ("csrc/zero/grad_offload.c", "take"): ("gradients wait for the copy down of their memory",),
    ("csrc/zero/grad_offload.c", "send"): ("the copy down waits for the gradients",),
    ("csrc/zero/grad_offload.c", "arrived"): ("the reduction waits for the copy down",),
    ("csrc/zero/step_ahead.c", "share_boards"): ("a norm waits for measured",),
    ("csrc/zero/step_device.c", "zpp_step_device_look"): ("an_outcome_is_waited_for",),
    ("csrc/zero/step_device.c", "zpp_step_device_destroy"): (AT_END,),
    ("csrc/zero/step_in_backward_device.c", "join_compute"): ("computation waits for steps inside the backward",),
    ("csrc/zero/step_in_backward_device.c", "zpp_device_steps_stepped"): ("sums wait for steps of torch's own",),
    ("csrc/zero/step_in_backward_device.c", "zpp_device_steps_look"): ("test_an_end_is_waited_for",),
    ("csrc/zero/step_in_backward_device.c", "end_work"): (AT_END,),
    ("csrc/zero/placement/nvme_up.c", "settle"): ("a step without gradients waits for copies after the last one",),
    ("csrc/zero/placement/nvme_up.c", "stage"): ("a staging waits for the copy from it",),
    ("csrc/zero/placement/nvme_up.c", "wait_gather"): (ON_HOST, "computation waits for the copy up from a file"),
    ("csrc/zero/placement/nvme_up.c", "copy_down"): ("the shard in a file waits for the values at set-up",),
    # what every wait for a counter goes through
    ("csrc/zero/reduce_device.c", "await_members"): ("sums wait for written",),
    ("csrc/comm/counters.c", "zpp_counters_await"): ("a bucket waits for taken",),
    ("csrc/comm/counters.c", "zpp_counters_await_some"): ("sums wait for written",),
    # rows of a mixture of experts
    ("csrc/comm/rows_device.c", "zpp_rows_device_begin"): ("is_wrong_without_its_wait",),
    ("csrc/comm/rows_device.c", "reserve"): (AT_END,),
}
"""By file and function: names of WAITS, of mutants of test_zero_device.c, or of a case of a C test; one for each call."""
HOST_FILES = {
    "bucket.c", "exchange.c", "group.c", "internode.c", "norm.c", "reduce.c", "reduce_shm.c", "step_delayed.c", "placement/nvme.c",
    "placement/nvme_net.c", "placement/sharded.c", "placement/sharded_net.c",
}  # fmt: skip
"""Files whose waits are for the queues of the host's device (ON_HOST): what a GPU does ends in one of the table."""


def waits_of(path: Path) -> Iterator[str]:
    """Yield the function around each wait of a C file."""
    function = ""
    for line in path.read_text().splitlines():
        if found := FUNCTION.match(line):
            function = found.group(1)
        for _ in CALL.finditer(line) if line.startswith(" ") else ():
            yield function


def test_every_wait_is_registered() -> None:
    files = [path for path in sorted((ROOT / "csrc/zero").rglob("*.c")) if "offload" not in path.parent.name]
    found: Counter[tuple[str, str]] = Counter()
    others = ("base/wrap.c", "comm/counters.c", "comm/rows_device.c")
    for path in [*files, *(ROOT / "csrc" / name for name in others)]:
        name = str(path.relative_to(ROOT))
        if name.removeprefix("csrc/zero/") not in HOST_FILES:
            found.update((name, function) for function in waits_of(path))
    assert found == {place: len(tests) for place, tests in PLACES.items()}


def test_every_registered_wait_has_a_test_that_leaves_it_out() -> None:
    mutants = re.findall(r'^    \{"([^"]+)", ', (ROOT / "tests/c/test_zero_device.c").read_text(), re.MULTILINE)
    programs = ("test_zero_step_device.c", "test_comm_rows_device.c")
    tests = [name for file in programs for name in re.findall(r"TEST\((\w+)\)", (ROOT / "tests/c" / file).read_text())]
    tests += re.findall(r"def (test_\w+)", (ROOT / "tests/zero/test_step_in_backward_gpu.py").read_text())
    known = {*mutants, *tests, *test_sim_offload.WAITS, *test_sim_offload.WAITS_OVER_HOSTS, *test_sim_on_device.WAITS}
    known |= {AT_END, ON_HOST}
    assert {name for names in PLACES.values() for name in names} <= known
