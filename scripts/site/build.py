# SPDX-License-Identifier: Apache-2.0
"""Build the documentation site: the pages of this repository, a reference of every public name, and the measured figures.

    python scripts/site/build.py [--out site]

The pages keep their places, so that links between them stay as they are. What a page links to besides pages, code and
examples, becomes a page too. The build fails for a link that leads nowhere, for a public name without a docstring
or an example, and for everything else that mkdocs warns about.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import yaml
from zeropp.cli import plot

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "site"
PAGES = WORK / "pages"
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]*)(#[^)\s]*)?\)", re.DOTALL)
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".cu": "cuda", ".yaml": "yaml", ".toml": "toml", ".sbatch": "bash"}

GUIDES = {
    "Start": {
        "What it is": "README.md",
        "Install, first run, first script": "docs/start.md",
        "What fits together": "docs/compatibility.md",
        "Errors and what to do": "docs/errors.md",
        "Terms": "docs/glossary.md",
    },
    "Guides": {
        "How parameters are gathered": "docs/units.md",
        "Models larger than memory": "docs/offload.md",
        "From DDP": "docs/from-ddp.md",
        "From FSDP": "docs/from-fsdp.md",
        "From DeepSpeed": "docs/from-deepspeed.md",
        "Hugging Face Trainer": "docs/hf.md",
        "TRL": "docs/trl.md",
        "Accelerate": "docs/accelerate.md",
        "Lightning and Fabric": "docs/lightning.md",
        "Ray": "docs/ray.md",
        "Several hosts": "docs/hosts.md",
        "SLURM": "docs/slurm.md",
        "Kubernetes": "docs/kubernetes.md",
        "Ranks that come and go": "docs/elastic.md",
        "Data efficiency": "docs/efficiency.md",
        "Mixtures of experts": "docs/moe.md",
        "Pipelines, tensors, sequences": "docs/parallel.md",
        "Checkpoints": "docs/checkpoints.md",
        "Looking inside a run": "docs/introspection.md",
    },
}
PROJECT = {
    "Papers": "docs/papers.md",
    "Checkpoints on disk": "docs/checkpoint-format.md",
    "Known failures, and the tests against them": "docs/failure-modes.md",
    "Other projects' tests": "docs/conformance.md",
    "Changes": "docs/CHANGELOG.md",
    "Versions": "docs/versions.md",
    "Contributing": "CONTRIBUTING.md",
    "The C code": "csrc/README.md",
    "The Python code": "python/README.md",
    "How to measure": "benchmarks/README.md",
}
REFERENCE = ROOT / "docs" / "reference"  # a page a module, with an example of each public name
FIRST = ("zeropp", "zeropp.config", "zeropp.parallel", "zeropp.moe", "zeropp.optim", "zeropp.nn", "zeropp.data")


class SiteError(Exception):
    """A page cannot be built; the message says where and why."""


def pages() -> list[Path]:
    """Return every Markdown page of the repository that the site has."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    found += [ROOT / folder / "README.md" for folder in ("csrc", "python", "benchmarks")]
    return found + sorted((ROOT / "docs").rglob("*.md"))


def source_page(target: Path) -> Path:
    """Write the page of a file that is no page itself, or of a folder; return it."""
    name = target.relative_to(ROOT).as_posix()
    page = PAGES / "source" / f"{name}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        inside = sorted(path for path in target.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        body = "\n".join(f"- `{path.relative_to(ROOT).as_posix()}`" for path in inside)
    else:
        fence = "`" * 4
        body = f"{fence}{LANGUAGES.get(target.suffix, '')}\n{target.read_text(encoding='utf-8')}\n{fence}"
    page.write_text(f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n{body}\n", encoding="utf-8")
    return page


def linked(page: Path, known: set[Path]) -> str:
    """Return the text of a page whose links lead to pages of the site."""

    def replaced(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if not target or ":" in target:
            return found[0]
        wanted = (page.parent / target).resolve()
        if wanted in known or wanted.suffix == ".svg":
            return found[0]
        if wanted.is_dir() and wanted / "README.md" in known:
            return f"{text}({target.rstrip('/')}/README.md{anchor})"
        if not wanted.exists() or not wanted.is_relative_to(ROOT):
            raise SiteError(f"{page.relative_to(ROOT)}: a link to {target}, which is not in the repository")
        made = source_page(wanted)
        here = PAGES / page.relative_to(ROOT)
        return f"{text}({Path(os.path.relpath(made, here.parent)).as_posix()})"

    parts = re.split(r"(^```.*?^```$)", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    for name in sorted(getattr(module, "__all__", own)):
        value = getattr(module, name)
        if not name.startswith("_") and not isinstance(value, TypeVar):
            yield name, value


def examples_of(page: Path) -> tuple[str, dict[str, str]]:
    """Return what a page of the reference says before its first example, and the examples by name, in their fences."""
    head, *parts = re.split(r"^## (.+)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return head, dict(zip(parts[::2], parts[1::2], strict=True))


def entry(module: str, name: str, value: Any) -> str:
    """Return heading, signature and docstring of a name: by mkdocstrings, where it finds the name in a file."""
    if not callable(value):
        return f"## {name}\n\n`{value!r}`"
    text = inspect.getdoc(value) or ""
    if not text:
        raise SiteError(f"{module}.{name} has no docstring: every public name of the reference needs one")
    if inspect.isclass(value) and not written_out(value):
        # A class that is made at run time, over one of another library, whose documentation has the rest.
        own = text if vars(value).get("__doc__") else text.partition("\n\n")[0]
        bases = ", ".join(f"`{base.__module__}.{base.__qualname__}`" for base in value.__bases__)
        return f"## {name}\n\nA class over {bases}.\n\n```text\n{own}\n```"
    return f"::: {value.__module__}.{value.__qualname__}"


def written_out(value: type) -> bool:
    """Return True for a class that a file defines at its top, where mkdocstrings finds it."""
    try:
        inspect.getsourcelines(value)
    except OSError:
        return False
    return "<locals>" not in value.__qualname__


def reference_page(page: Path) -> str:
    """Return the page of a module's public names: each with signature, docstring and example; what lacks one is an error."""
    module = importlib.import_module(page.stem)
    head, examples = examples_of(page)
    shared = {id(getattr(module, name)): name for name in examples}
    if page.stem != "zeropp":  # names that stand in zeropp too have their example there
        top = importlib.import_module("zeropp")
        above = examples_of(REFERENCE / "zeropp.md")[1]
        examples = {**examples, **{name: text for name, text in above.items() if name not in examples}}
        shared = {**{id(getattr(top, name)): name for name in above}, **shared}
    title, _, text = head.partition("\n")
    lines = [title, "", inspect.getdoc(module) or "", text]
    for name, value in public_names(module):
        if id(value) not in shared:
            raise SiteError(f"{page.stem}.{name} has no example: {page.relative_to(ROOT)} wants one")
        lines += [entry(page.stem, name, value), "", "Example:", "", examples[shared[id(value)]].strip(), ""]
    return "\n".join(lines)


def figures_page() -> str:
    """Draw all results, and return the page that shows them with the machines that they come from."""
    folder = PAGES / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# Measured", "", "Contenders take turns on one machine, and a ratio is taken within each turn.", ""]
    stored = [row for path in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")) for row in plot.read(path)]
    for bench in sorted({row["bench"] for row in stored}):
        usable = plot.newest(stored, bench)
        if not usable:
            continue
        plot.ratios(bench, usable).savefig(folder / f"{bench}.svg")
        machines = sorted({row["machine"] for row in usable})
        lines += [
            f"## {bench}",
            "",
            f"![Ratios of {bench}](figures/{bench}.svg)",
            "",
            *(f"- {name}" for name in machines),
        ]
        lines += ["", f"Repeat it: `{usable[0]['command'].split(' --json')[0]}`", ""]
    return "\n".join(lines)


def design_notes() -> list[dict[str, str]]:
    notes = []
    for path in sorted((ROOT / "docs" / "design").glob("*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        notes.append({title: path.relative_to(ROOT).as_posix()})
    return notes


def settings(out: Path) -> dict[str, Any]:
    sections = [{title: [{name: page} for name, page in entries.items()]} for title, entries in GUIDES.items()]
    others = sorted({page.stem for page in REFERENCE.glob("*.md")} - set(FIRST))
    titles = [*FIRST, *others]
    reference = [{title: f"docs/reference/{title}.md"} for title in titles]
    options = {"show_root_heading": True, "show_root_full_path": False, "show_source": False, "heading_level": 2}
    handler = {"paths": [str(ROOT / "python")], "options": {**options, "docstring_style": "google"}}
    return {
        "site_name": "zeropp",
        "docs_dir": str(PAGES),
        "site_dir": str(out),
        "theme": {"name": "material", "font": False, "features": ["navigation.tabs", "navigation.top", "search.highlight"]},
        "plugins": ["material/search", "material/offline", {"mkdocstrings": {"handlers": {"python": handler}}}],
        "markdown_extensions": ["admonition", "tables", "pymdownx.highlight", "pymdownx.superfences", "toc"],
        "extra_css": ["extra.css"],
        "validation": {"links": {"anchors": "warn", "unrecognized_links": "warn"}, "nav": {"omitted_files": "ignore"}},
        "use_directory_urls": False,
        "nav": [
            *sections,
            {"Reference": reference},
            {"Measured": "measured.md"},
            {"Design": design_notes()},
            {"Project": [{name: page} for name, page in PROJECT.items()]},
        ],
    }  # fmt: skip


def replace_worker(out: Path) -> None:
    """Let searches in files use the worker of this folder, in place of one that the plugin would fetch from a network."""
    shutil.copy(Path(__file__).with_name("worker.js"), out / "assets" / "worker.js")
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        up = Path(os.path.relpath(out / "assets" / "worker.js", page.parent)).as_posix()
        page.write_text(re.sub(r'"https://[^"]*/iframe-worker/shim"', f'"{up}"', text), encoding="utf-8")


def build(out: Path) -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    known = set(pages())
    for page in sorted(known):
        target = PAGES / page.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = reference_page(page) if page.parent == REFERENCE else linked(page, known)
        target.write_text(text, encoding="utf-8")
    for picture in (ROOT / "docs").rglob("*.svg"):
        shutil.copy(picture, PAGES / picture.relative_to(ROOT))
    shutil.copy(Path(__file__).with_name("extra.css"), PAGES)
    (PAGES / "measured.md").write_text(figures_page(), encoding="utf-8")
    (WORK / "mkdocs.yml").write_text(yaml.safe_dump(settings(out), sort_keys=False), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(WORK / "mkdocs.yml")]
    )
    if done.returncode:
        raise SiteError("mkdocs refused the pages; its warnings are above")
    replace_worker(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "site")
    options = parser.parse_args()
    try:
        build(options.out.resolve())
    except SiteError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
