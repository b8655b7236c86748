# SPDX-License-Identifier: Apache-2.0
"""One rank of a launch: `rank.py MODULE ANSWERS CASE...` runs MODULE.CASES[case]() and appends one JSON line per
case."""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import json
import sys
import time
import traceback
import warnings

import torch
import torch.distributed as dist

CASE_S = 90.0  # a case that takes longer hangs: the log then says where. A module's LONG_CASES_S has others, by case


def main(module: str, answers: str, cases: list[str]) -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = importlib.import_module(module)
    table, long = found.CASES, getattr(found, "LONG_CASES_S", {})
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    with open(answers, "a", buffering=1) as out:  # noqa: PTH123
        for case in cases:
            out.write(json.dumps({"case": case, "begun": True}) + "\n")
            faulthandler.dump_traceback_later(long.get(case, CASE_S), exit=True)
            started = time.monotonic()
            try:
                value = table[case]()
            except BaseException:
                out.write(json.dumps({"case": case, "error": traceback.format_exc()}) + "\n")
                return 1
            seconds = round(time.monotonic() - started, 2)
            out.write(json.dumps({"case": case, "value": value, "seconds": seconds}) + "\n")
            dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
