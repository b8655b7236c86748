# SPDX-License-Identifier: Apache-2.0
"""Measure the structure of the tree and fail where a figure is above its ceiling.

    python scripts/lint_structure.py             compare each figure with scripts/structure.toml
    python scripts/lint_structure.py --show NAME list what a figure counts: functions, cycles, sentences
    python scripts/lint_structure.py --lower     write the figures that fell into scripts/structure.toml

A ceiling is what the tree reached once. It may fall and never rises: a change that needs a higher one has to take
something else away. Complexity is the cyclomatic complexity that lizard counts (PyPI: lizard).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import combinations
from pathlib import Path

import lizard
import networkx

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = ROOT / "scripts" / "structure.toml"
PACKAGE = ROOT / "python" / "zeropp"
COMPLEX = 12  # functions above this are counted
RUN_LINES = 6  # as many lines in a row make a repetition
THICK = 20  # mean length from which lines equal but for names say something
COMMON = 8  # a run that stands in more places is a form, not a repetition
COLUMNS = 120  # of a line of prose
AREAS = ("ops", "comm", "aio", "zero", "bind")
# Of python/zeropp, the lowest first: a module may import its own layer and those before it, for types alone, too.
LAYERS = (
    *("errors", "config compat", "aio comm files health ops process_group", "optim", "efficiency parallel zero"),
    *("checkpoint data elastic moe nn", "accelerate deepspeed deepspeed_names hf lightning", "__main__ cli"),
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names.split()}
FEATURES = "scaler|update|inner|onebit|stored|_params|storage|states|params|grads|activations|delayed|early|away"
FRAGMENT = re.compile(r"(?:Of|What|Where|Those|The same)\b")

Found = list[str]
text_of = cache(partial(Path.read_text, encoding="utf-8"))
tree_of = cache(lambda path: ast.parse(text_of(path)))
functions_of = cache(lambda path: list(lizard.analyze_file(str(path)).function_list))


@cache
def sources(folder: str, *endings: str) -> tuple[Path, ...]:
    return tuple(sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in endings))


C_FILES = sources("csrc", ".c", ".h", ".cu", ".cuh", ".def")
PYTHON_FILES = sources("python/zeropp", ".py")
CODE = [path for path in (*C_FILES, *PYTHON_FILES) if path.suffix != ".def"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def files_in(folder: str) -> Found:
    return [name_of(path) for path in (*C_FILES, *PYTHON_FILES) if name_of(path).startswith(folder)]


def lines_in(folder: str) -> int:
    return sum(len(text_of(ROOT / name).splitlines()) for name in files_in(folder))


def cycles(edges: dict[str, set[str]]) -> list[Found]:
    """Return the groups of two or more nodes that reach each other, the largest first."""
    found = networkx.strongly_connected_components(networkx.DiGraph(edges))
    return sorted((sorted(group) for group in found if len(group) > 1), key=lambda group: (-len(group), group))


def c_cycles() -> list[Found]:
    """Group the C files that call each other's exported functions in a circle."""
    home: dict[str, str] = {}
    files = [path for path in C_FILES if path.suffix == ".c"]
    for path in files:
        lines = text_of(path).splitlines()
        for function in functions_of(path):
            if not re.match(r"\s*static\b", lines[function.start_line - 1]):
                home[function.name] = name_of(path)
    edges = {}
    for path in files:
        words = set(re.findall(r"\w+", re.sub(r"/\*.*?\*/", "", text_of(path), flags=re.DOTALL)))
        edges[name_of(path)] = {home[word] for word in words if word in home} - {name_of(path)}
    return cycles(edges)


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> Iterator[str]:
    """Yield the modules that a file names in its imports, wherever they stand in it."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module or "" for name in inner)


def python_imports() -> dict[str, set[str]]:
    """Return the modules that each module imports; imports for types alone count, too."""
    files = {module_of(path): path for path in PYTHON_FILES}
    known = {*files, "zeropp._C"}
    return {name: (set(imports_of(path, known)) & files.keys()) - {name} for name, path in files.items()}


def climbing_imports() -> Found:
    """List imports of a higher layer; the public names, which stand in zeropp itself, are of the frameworks' layer."""
    edges = python_imports()
    layer = {name: LAYER_OF.get((name + ".").split(".")[1] or "hf", len(LAYERS)) for name in edges}
    rows = ((name, other) for name in edges for other in sorted(edges[name]))
    return [f"{name} -> {other}" for name, other in rows if name != "zeropp" and layer[name] < layer[other]]


def complexity(*endings: str, least: int = COMPLEX + 1) -> Found:
    """Return "complexity place" of every function of that complexity at least, in files with these endings."""
    return [
        f"{function.cyclomatic_complexity} {name_of(path)}:{function.start_line} {function.name}"
        for path in CODE
        if path.suffix in endings
        for function in functions_of(path)
        if function.cyclomatic_complexity >= least
    ]


def code_lines(path: Path, by_shape: bool) -> list[tuple[int, str]]:
    """Return (number, text) of the lines of code; by shape, names, strings and numbers look alike."""
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text_of(path), flags=re.DOTALL)
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        line = " ".join(line.split())
        if not re.search(r"\w", line) or line.startswith(("#", "//", "import ", "from ")):
            continue
        if by_shape:
            line = re.sub(r"'[^']*'|\"[^\"]*\"", '""', line)
            line = re.sub(r"\b(?!(?:if|for|return|else|def|static|const|while|with|case)\b)\w+", "x", line)
        lines.append((number, line))
    return lines


@cache
def repetitions(by_shape: bool) -> dict[tuple[str, str], str]:
    """Return a place in each of two files (or one) for each pair that shares RUN_LINES or more lines in a row."""
    places: dict[tuple[str, ...], list[tuple[str, int, int]]] = defaultdict(list)
    for path in CODE:
        lines = code_lines(path, by_shape)
        for at in range(len(lines) - RUN_LINES + 1):
            window = tuple(line for _, line in lines[at : at + RUN_LINES])
            if not by_shape or sum(map(len, window)) >= RUN_LINES * THICK:
                places[window].append((name_of(path), at, lines[at][0]))
    found: dict[tuple[str, str], str] = {}
    for where in places.values():
        for (name, at, line), (other, other_at, other_line) in combinations(where if len(where) <= COMMON else (), 2):
            if name != other or other_at - at >= RUN_LINES:
                found.setdefault((name, other), f"{name}:{line} ~ {other}:{other_line}")
    return found


def repeated(by_shape: bool) -> Found:
    known = repetitions(by_shape=False) if by_shape else {}
    return sorted(place for pair, place in repetitions(by_shape).items() if pair not in known)


def modules_in(folder: Path) -> Found:
    return [name_of(path) for path in PYTHON_FILES if path.parent == folder]


def feature_tests() -> Found:
    wanted = re.compile(rf"\.(?:{FEATURES}) is (?:not )?None")
    return [f"{name_of(path)} {found[0]}" for path in PYTHON_FILES for found in wanted.finditer(text_of(path))]


def late_imports() -> Found:
    nodes = ((path, node) for path in PYTHON_FILES for node in ast.walk(tree_of(path)))
    functions = [(path, node) for path, node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = ((path, node) for path, function in functions for node in ast.walk(function))
    return sorted({f"{name_of(p)}:{n.lineno}" for p, n in inside if isinstance(n, ast.Import | ast.ImportFrom)})


def docstrings(wanted: Callable[[str], object]) -> Found:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        f"{name_of(path)}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}"
        for path in PYTHON_FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and wanted(text)
    ]


def prose_lines() -> Iterator[tuple[str, str]]:
    """Yield (place, line) of the Markdown pages, without code and tables."""
    for path in [ROOT / "README.md", *sources("docs", ".md"), *sources("csrc", ".md"), *sources("python", ".md")]:
        fenced = False
        for number, line in enumerate(text_of(path).splitlines(), 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif not fenced and not line.lstrip().startswith("|"):
                yield f"{name_of(path)}:{number}", line


@cache
def sentence_words() -> list[int]:
    """Count the words of each sentence; a heading or an item of a list ends one."""
    text = "\n".join(re.sub(r"^\s*(?:#+|[-*]|\d+\.) ", "\n\n", line) for _, line in prose_lines())
    pieces = re.split(r"\n\s*\n|(?<=[.!?])\s+(?=[A-Z`*\[])", text)
    return [count for piece in pieces if (count := len(piece.split())) > 2]


FIGURES: dict[str, Callable[[], Found | float]] = {
    "c call cycles": lambda: [" ".join(group) for group in c_cycles()],
    "python import cycle, modules": lambda: next(iter(cycles(python_imports())), []),
    "python imports of a higher layer": climbing_imports,
    "complexity of the most complex function": lambda: max(int(x.split()[0]) for x in complexity(".c", ".py", least=1)),
    f"c functions of complexity above {COMPLEX}": partial(complexity, ".c"),
    f"python functions of complexity above {COMPLEX}": partial(complexity, ".py"),
    "csrc files": partial(files_in, "csrc/"),
    "csrc lines": partial(lines_in, "csrc/"),
    **{f"csrc/{area} files": partial(files_in, f"csrc/{area}/") for area in AREAS},
    **{f"csrc/{area} lines": partial(lines_in, f"csrc/{area}/") for area in ("ops", "zero", "bind")},
    "python modules": partial(files_in, "python/"),
    "python lines": partial(lines_in, "python/"),
    "python modules at the top": lambda: modules_in(PACKAGE),
    "python modules in zero": lambda: modules_in(PACKAGE / "zero"),
    "python modules in the fullest folder": lambda: max(
        (modules_in(folder) for folder in {path.parent for path in PYTHON_FILES}), key=len
    ),
    f"pairs with {RUN_LINES} equal lines": lambda: repeated(by_shape=False),
    f"pairs with {RUN_LINES} lines equal but for names": lambda: repeated(by_shape=True),
    "tests for a missing engine feature": feature_tests,
    "imports inside functions": late_imports,
    "docstrings that open with a fragment": lambda: docstrings(FRAGMENT.match),
    "docstrings with a question": lambda: docstrings(lambda text: "?" in text),
    "words in a sentence, mean": lambda: round(statistics.mean(sentence_words()), 1),
    "words in a sentence, 90th percentile": lambda: statistics.quantiles(sentence_words(), n=10)[-1],
    f"prose lines above {COLUMNS} columns": lambda: [place for place, line in prose_lines() if len(line) > COLUMNS],
}


def denied_names(words: Iterable[str]) -> Found:
    """List file names and identifiers of csrc and python that use a word of the deny-list."""
    wanted = re.compile(rf"(?<![a-zA-Z])(?:{'|'.join(words) or '(?!)'})(?![a-zA-Z])")
    found = []
    for path in [*C_FILES, *PYTHON_FILES]:
        names = {name_of(path), *re.findall(r"[A-Za-z]*_\w*|\b[a-z]\w*(?=\()", text_of(path))}
        found += [f"{name_of(path)}: {name}" for name in sorted(names) if wanted.search(name)]
    return found


def compare(ceilings: dict[str, float]) -> dict[str, float]:
    """Print each figure beside its ceiling and return the figures."""
    values = {}
    for name, figure in FIGURES.items():
        found = figure()
        values[name] = len(found) if isinstance(found, list) else found
        ceiling = ceilings.get(name, 0)
        print(f"{name:44} {values[name]:8g} {ceiling:8g}{'  ABOVE' if values[name] > ceiling else ''}")
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", choices=FIGURES, metavar="NAME", help="list what a figure counts")
    parser.add_argument("--lower", action="store_true", help="write the figures that fell into structure.toml")
    arguments = parser.parse_args()
    if arguments.show:
        print(*(value if isinstance(value := FIGURES[arguments.show](), list) else [value]), sep="\n")
        return 0
    written = CEILINGS.read_text(encoding="utf-8")
    settings = tomllib.loads(written)
    values = compare(ceilings := settings["ceilings"])
    denied = denied_names(settings["denied"]["words"])
    print(*denied, f"names with a denied word: {len(denied)}", sep="\n")
    if arguments.lower:
        rows = "".join(f'"{name}" = {min(value, ceilings.get(name, value)):g}\n' for name, value in values.items())
        CEILINGS.write_text(f"{written.partition('[ceilings]')[0]}[ceilings]\n{rows}", encoding="utf-8")
        return 0
    above = [name for name, value in values.items() if value > ceilings.get(name, 0)]
    for name in above:
        print(f"{name!r} is above its ceiling: take something away; see scripts/lint_structure.py --show {name!r}")
    return 1 if above or denied else 0


if __name__ == "__main__":
    sys.exit(main())
