"""The documentation site builds without a warning, and each link in it leads to a page and an anchor that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent


def build(tree: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def broken_links(site: Path) -> list[str]:
    """Links of the built pages to files or anchors that are not in the site."""
    # Links of 404.html are absolute.
    pages = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    anchors = {path: set(re.findall(r'\sid="([^"]+)"', text)) for path, text in pages.items()}
    broken = []
    for path, text in pages.items():
        for link in re.findall(r'\s(?:href|src)="([^"]+)"', text):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            lost_anchor = parts.fragment and target in anchors and unquote(parts.fragment) not in anchors[target]
            if not target.exists() or (lost_anchor and not parts.fragment.startswith("__")):
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def test_every_page_is_built_and_no_link_is_broken(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}
    assert broken_links(site) == []


def test_links_to_files_of_the_repository_became_text(site):
    page = (site / "operating" / "access.html").read_text()
    assert "SECURITY.md</code>" in page
    assert 'SECURITY.md"' not in page


def test_pages_made_of_files_at_the_root_are_in_the_site(site):
    security, comparison = ((site / f"{name}.html").read_text() for name in ("security", "comparison"))
    assert '<h2 id="residual-risks">' in security
    assert "Tair KVCache Manager" in comparison
    assert "Status and limits" not in comparison


def test_broken_links_of_a_built_page_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<p id="here"><a href="b.html"></a><a href="#here"></a><a href="a.html#gone"></a>')
    assert broken_links(tmp_path) == ["a.html: b.html", "a.html: a.html#gone"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gone](gone.md)", "gone.md"),
        ("[gone](glossary.md#gone)", "gone"),
        ("[gone](../GONE.md)", "the link to ../GONE.md leads nowhere"),
        ("unlisted page", 'not included in the "nav" configuration'),
        ("renamed section", "there is no section 'Compared with'"),
    ],
)
def test_fault_ends_the_build(text, complaint, tmp_path):
    tree = tmp_path / "tree"
    (tree / "scripts").mkdir(parents=True)
    for name in ("mkdocs.yml", "scripts/docs_links.py", "README.md", "SECURITY.md"):
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(ROOT / "docs", tree / "docs")
    for page in (ROOT / "docs").rglob("*.md"):
        for target in re.findall(r"\]\((\.\./[^)#\s]+)", page.read_text()):
            outside = (page.parent / target).resolve().relative_to(ROOT)
            (tree / outside).parent.mkdir(parents=True, exist_ok=True)
            (tree / outside).touch()
    if text == "unlisted page":
        (tree / "docs" / "unlisted.md").write_text("# Unlisted\n")
    elif text == "renamed section":
        (tree / "README.md").write_text((ROOT / "README.md").read_text().replace("## Compared", "## Others"))
    else:
        with (tree / "docs" / "glossary.md").open("a") as page:
            page.write(f"\n{text}\n")
    done = build(tree, tmp_path / "site")
    assert done.returncode != 0
    assert complaint in done.stdout + done.stderr
