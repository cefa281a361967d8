"""Hook of mkdocs.yml: the pages in docs/ link to files of the repository, which are not part of the site. There, such a
link becomes its text with the path of the file. A link to a file that does not exist ends the build. Two pages are made
of files at the root, which GitHub shows where they are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s#]+)(?:#[^)\s]*)?\)")

# Pages of the site: file, and the section of it that is the page, empty for the whole file.
FROM_THE_ROOT = {"security.md": ("SECURITY.md", ""), "comparison.md": ("README.md", "Compared with")}


def section_of(text: str, title: str) -> str:
    """Return a section of a Markdown text as a page, or the text if the title is empty.

    Raises:
        ValueError: if the text has no such section.
    """
    if not title:
        return text
    _, found, rest = text.partition(f"\n## {title}\n")
    if not found:
        raise ValueError(f"there is no section {title!r} (correct FROM_THE_ROOT in scripts/docs_links.py)")
    return f"# {title}\n" + rest.partition("\n## ")[0]


def on_files(files: Any, *, config: Any, **_: object) -> Any:  # noqa: ANN401 - MkDocs calls it
    """Called by MkDocs with the files of docs/: add the pages that are made of files at the root."""
    for page, (name, title) in FROM_THE_ROOT.items():
        content = section_of((ROOT / name).read_text(), title).replace("](docs/", "](")
        files.append(File.generated(config, page, content=content))
    return files


def without_links_to_the_repository(markdown: str, page: Path) -> str:
    """Return the text of a page of docs/ with each link to a file outside docs/ replaced by text.

    Raises:
        FileNotFoundError: if there is no such file; it names the page and the link.
    """

    def as_text(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = (page.parent / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return link.group()
        if not path.exists() or not path.is_relative_to(ROOT):
            raise FileNotFoundError(f"{page.relative_to(ROOT)}: the link to {target} leads nowhere (correct its path)")
        name = str(path.relative_to(ROOT))
        return f"`{name}`" if text.strip("`") == name else f"{text} (`{name}` in the repository)"

    return LINK.sub(as_text, markdown)


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:  # noqa: ANN401 - MkDocs calls it
    """Called by MkDocs for each page."""
    return without_links_to_the_repository(markdown, ROOT / "docs" / page.file.src_uri)
