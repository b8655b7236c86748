#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the table of other projects' scripts and names into docs/from-deepspeed.md, from tests/deepspeed/projects.json.

    python scripts/deepspeed_table.py            write the table
    python scripts/deepspeed_table.py --check    say whether it is up to date
    python scripts/deepspeed_table.py --measure  ask zeropp which names work, record it, and write the table

The data file has names and paths alone, by project: which names of deepspeed each file reads, which of them zeropp answers with a
sentence when they are used, by which option a script gets there (``only``), and which test makes the same calls (``test``).
tests/deepspeed/test_names.py reads every name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "deepspeed" / "projects.json"
PAGE = ROOT / "docs" / "from-deepspeed.md"
BEGIN, END = "<!-- scripts/deepspeed_table.py writes from here -->", "<!-- to here -->"
STATES = ("runs", "runs, with a sentence", "names work", "names work, with a sentence", "not yet")


def state(row: dict[str, Any], sentences: set[str]) -> str:
    """Return the state of one file, a key of STATES. "with a sentence": an option of the script leads to a name that raises one."""
    later = [name for name in row["names"] if name in sentences]
    if set(later) - set(row.get("only", {})):
        return "not yet"
    return ("runs" if "test" in row else "names work") + (", with a sentence" if later else "")


def lines(data: dict[str, Any]) -> Iterator[str]:
    sentences = set(data["names"]["sentence"])
    yield "| project | files | names: work / raise a sentence | " + " | ".join(STATES) + " |"
    yield "|---|---|---|" + "---|" * len(STATES)
    waits: dict[str, list[str]] = {}
    options: dict[str, list[str]] = {}
    tested: dict[str, list[str]] = {}
    for project, rows in data["projects"].items():
        names = {name for row in rows.values() for name in row["names"]}
        found = [state(row, sentences) for row in rows.values()]
        counts = " | ".join(str(found.count(one) or "") for one in STATES)
        yield f"| {project} | {len(rows)} | {len(names - sentences)} / {len(names & sentences)} | {counts} |"
        for path, row in rows.items():
            later = [name for name in row["names"] if name in sentences and name not in row.get("only", {})]
            where = f"{project.partition('/')[2]}: `{path}`"
            if later:
                waits.setdefault(feature(later[0]), []).append(where)
            for option in dict.fromkeys(row.get("only", {}).values()):
                options.setdefault(option, []).append(where)
            if "test" in row:
                tested.setdefault(row["test"], []).append(where)
    for title, found_by in (
        ("runs: by `tests/deepspeed/test_scripts.py`", tested),
        ("with a sentence: by option", options),
        ("not yet: the first name that is missing", waits),
    ):
        yield ""
        yield f"| {title} | scripts |"
        yield "|---|---|"
        for what, where_all in sorted(found_by.items()):
            yield f"| `{what}` | {', '.join(where_all)} |"


def feature(name: str) -> str:
    """A name, or its folder where one folder is one feature."""
    for folder in ("compile.passes", "inference", "compression.compress", "io", "runtime.data_pipeline"):
        if name.startswith(f"deepspeed.{folder}."):
            return f"deepspeed.{folder}"
    return name


def page(text: str, data: dict[str, Any]) -> str:
    """The page with its table written anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n\n" + "\n".join(lines(data)) + "\n\n" + END + after


def measured(data: dict[str, Any]) -> dict[str, Any]:
    """The data with what zeropp says about each name today."""
    from zeropp.deepspeed.names import tree

    found: dict[str, list[str]] = {"works": [], "sentence": []}
    for name in sorted({name for rows in data["projects"].values() for row in rows.values() for name in row["names"]}):
        found["sentence" if tree.raises(name) else "works"].append(name)
    return {"names": found, "projects": data["projects"]}


def compact(data: dict[str, Any]) -> str:
    """JSON with a line a name, and a line a file."""
    names = [
        f'    "{kind}": [\n' + ",\n".join(f"      {json.dumps(one)}" for one in all_) + "\n    ]"
        for kind, all_ in data["names"].items()
    ]
    projects = [
        f"    {json.dumps(project)}: {{\n"
        + ",\n".join(f"      {json.dumps(path)}: {json.dumps(row)}" for path, row in rows.items())
        + "\n    }"
        for project, rows in data["projects"].items()
    ]
    inside = (",\n".join(names), ",\n".join(projects))
    return '{{\n  "names": {{\n{}\n  }},\n  "projects": {{\n{}\n  }}\n}}\n'.format(*inside)


def main() -> int:
    if "--measure" in sys.argv[1:]:
        DATA.write_text(compact(measured(json.loads(DATA.read_text(encoding="utf-8")))), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    new = page(text, json.loads(DATA.read_text(encoding="utf-8")))
    if "--check" in sys.argv[1:]:
        if new != text:
            print(f"{PAGE.relative_to(ROOT)}: the table is not up to date; run python scripts/deepspeed_table.py")
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
