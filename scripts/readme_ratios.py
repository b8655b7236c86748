#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the table of measured ratios into README.md, from the rows that benchmarks/results holds.

python scripts/readme_ratios.py            write the table
python scripts/readme_ratios.py --check    exit with status 1 where README.md has another table
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "README.md"
BEGIN, END = "<!-- scripts/readme_ratios.py writes from here -->", "<!-- to here -->"

# What the table shows: benchmark, case of its stored rows, and what a reader has to know of that case.
CASES = (
    ("step", "stage 3 25M 2 ranks", "training step, GPT of 25M parameters, ZeRO-3, 2 ranks"),
    ("step", "stage 3 25M 2 ranks memory", "peak memory of that run, both ranks together"),
    ("zero_step", "stage 3 100M 2 ranks", "training step, GPT of 95M parameters, ZeRO-3, 2 ranks"),
    ("hf_step", "Trainer stage 3 8M 2 ranks", "step under Hugging Face's Trainer, 8M parameters, ZeRO-3, 2 ranks"),
    ("cpu_adam", "fp32 100M 2 threads huge pages", "AdamW, 100M fp32 parameters, 2 threads"),
    ("cpu_adam", "bf16 100M 2 threads huge pages", "AdamW, 100M bf16 parameters with fp32 masters, 2 threads"),
    ("collectives", "all_reduce 4096 B 2 ranks dist", "`all_reduce` of 4 KiB through `torch.distributed`, 2 ranks"),
    ("collectives", "all_reduce 64 MB 2 ranks ordinary", "`all_reduce` of 64 MB, called directly, 2 ranks"),
    ("tcp", "all_reduce 16 MB 2 ranks 2 hosts", "`all_reduce` of 16 MB over TCP, 2 network namespaces"),
    ("checkpoint_save", "1195 MB new files", "checkpoint of 1.2 GB, written to new files"),
    ("infinity_step", "fp32 152M 2048 tokens 1 rank, step inside", "step from NVMe, 152M parameters, 2048 tokens"),
    ("infinity_step", "fp32 152M 128 tokens 1 rank, step inside", "the same with 128 tokens"),
    ("import_time", "import beyond torch", "import, beyond `import torch`"),
)


def rows_of(bench: str, case: str) -> list[dict[str, Any]]:
    """Return the stored rows of a case, one a peer. Raise KeyError where there are none."""
    lines = (RESULTS / f"{bench}.jsonl").read_text(encoding="utf-8").splitlines()
    found = [row for row in map(json.loads, lines) if row["case"] == case and "ratio" in row]
    if not found:
        raise KeyError(f"benchmarks/results/{bench}.jsonl has no row with a ratio for case {case!r}")
    return found


def quantity(value: float, unit: str) -> str:
    """Return a value with three digits and its unit."""
    digits = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return f"{digits} {unit}"


def compared(row: dict[str, Any]) -> str:
    """Return a peer with the median ratio and its quartiles."""
    ratio, low, high = (f"{row[key]:.3g}" for key in ("ratio", "ratio_low", "ratio_high"))
    return f"{row['peer_name']} **{ratio}** ({low} to {high})"


def lines() -> Iterator[str]:
    """Yield the lines of the table, then the machines and versions of its rows."""
    yield "| what was measured | zeropp | ratio to each peer: median (quartiles) | on |"
    yield "|---|---|---|---|"
    machines: list[str] = []
    versions: list[str] = []
    for bench, case, label in CASES:
        rows = rows_of(bench, case)
        machine = rows[0]["machine"]
        for known, value in ((machines, machine), (versions, rows[0]["versions"])):
            if value not in known:
                known.append(value)
        letter = "ABCDEFGH"[machines.index(machine)]
        ours = quantity(rows[0]["ours"], rows[0]["unit"])
        yield f"| {label} | {ours} | {'; '.join(map(compared, rows))} | {letter} |"
    yield ""
    yield from (f"- {letter}: {machine}" for letter, machine in zip("ABCDEFGH", machines, strict=False))
    yield from (f"- Versions: {one}" for one in versions)


def written(page: str) -> str:
    """Return the page with the table of today's results between its two markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join((f"{before}{BEGIN}\n", *lines(), f"\n{END}{after}"))


def draw(folder: Path) -> Path:
    """Draw the figure of the README into a folder, with the command that its section names; return its path."""
    rows = RESULTS / "step.jsonl"
    call = [sys.executable, "-m", "zeropp", "plot", str(rows), "--case", "stage 3", "--format", "svg"]
    subprocess.run([*call, "--out", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder / "step.svg"


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    wanted = written(page)
    if "--check" in sys.argv[1:]:
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    draw(ROOT / "docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
