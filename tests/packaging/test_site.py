# SPDX-License-Identifier: Apache-2.0
"""The documentation site: it is built without a warning, no link is dead, and its search works without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'zeropp[docs]' brings it")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install 'zeropp[docs]' brings it")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "scripts/site/build.py", "--out", str(out)],
        cwd=root, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_link_of_every_page_leads_to_a_file(site: Path) -> None:
    dead = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links begin at the root of a server
            continue
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            if not (page.parent / target).exists():
                dead.append(f"{page.relative_to(site)}: {target}")
    assert not dead


def test_pages_load_nothing_from_a_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'<(?:script|img)[^>]*src="?https?:', text), page
        assert not re.search(r'<link[^>]*rel="?stylesheet"?[^>]*href="?https?:', text), page


def test_the_reference_shows_signatures(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "docs" / "reference" / "zeropp.html").read_text(encoding="utf-8"))
    assert re.search(r"prepare\(\s*model,\s*optimizer", text)
    assert "A checkpoint is damaged or does not fit" in text
    assert 'zeropp.load("checkpoints", model, optimizer)' in text.replace("&quot;", '"')


@pytest.fixture
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if not program:
        pytest.skip("there is no chromium here")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


def watched(browser: Any, width: int) -> tuple[Any, list[str]]:
    """Return a page of that width, and the list of what it complains about."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("requestfailed", lambda request: said.append(request.url))
    return page, said


GUIDES = {
    "start": "First script", "from-ddp": "What differs", "from-fsdp": "What differs", "from-deepspeed": "DeepSpeed",
    "hf": "Trainer", "trl": "TRL", "accelerate": "Accelerate", "lightning": "Fabric", "ray": "prepare_model",
    "slurm": "sbatch", "kubernetes": "Job", "offload": "NVMe", "hosts": "TCP", "checkpoints": "Check, and take elsewhere",
    "errors": "Every status", "versions": "Tried",
}  # fmt: skip


def test_every_guide_is_in_the_navigation_and_opens(site: Path, browser: Any) -> None:
    page, said = watched(browser, 1280)
    page.goto((site / "index.html").as_uri())
    in_navigation = page.evaluate("[...document.querySelectorAll('.md-nav__link')].map(link => link.href || '')")
    for name, words in GUIDES.items():
        assert any(target.endswith(f"docs/{name}.html") for target in in_navigation), name
        page.goto((site / "docs" / f"{name}.html").as_uri())
        article = page.locator("article")
        assert words in article.inner_text(), name
    assert said == []


@pytest.mark.parametrize("name", ["index", "docs/offload", "docs/papers", "docs/reference/zeropp", "measured"])
def test_no_page_is_wider_than_a_phone(site: Path, browser: Any, name: str) -> None:
    """Wide tables and code scroll inside of the page; the page itself does not."""
    page, said = watched(browser, 390)
    page.goto((site / f"{name}.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert said == []


@pytest.mark.parametrize("width", [390, 1280])
def test_search_works_in_files(site: Path, browser: Any, width: int) -> None:
    page, said = watched(browser, width)
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.wait_for_timeout(500)
    page.keyboard.type("CheckpointError")
    found = page.locator(".md-search-result__item").filter(has_text="A checkpoint is damaged")
    found.first.wait_for(timeout=20_000)
    assert said == []
