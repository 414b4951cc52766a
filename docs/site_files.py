# SPDX-License-Identifier: Apache-2.0
"""MkDocs hook: the site holds pages of the whole repository, at the paths that they have in it.

A relative link then means the same on a git host and on the site. The site starts from `PAGES`
and takes in every file of the repository that a page links to.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "DESIGN.md",
    "CHANGELOG.md",
    "docs/*.md",
    "configs/reference/*/*.md",
    "kernels/bench/notes/*.md",
)
# A code span may go on in the next line of its paragraph.
_CODE = re.compile(r"^```.*?^```|`(?:[^`\n]|\n(?!\n))*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)")


def linked_files(page: Path) -> set[Path]:
    """Files of the repository that a Markdown page links to or shows."""
    targets = _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8")))
    paths = {(page.parent / target).resolve() for target in targets if ":" not in target}
    return {path for path in paths if path.is_file() and path.is_relative_to(ROOT)}


def site_paths() -> list[Path]:
    """Every file of the site, relative to the repository."""
    todo = [page for pattern in PAGES for page in ROOT.glob(pattern)]
    found: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += linked_files(path) if path.suffix == ".md" else ()
    return sorted(path.relative_to(ROOT) for path in found)


def on_files(files: Files, config: Any) -> Files:
    """Put the repository's pages in the place of the files under `docs_dir`."""
    theme = [file for file in files if file.src_dir != config["docs_dir"]]
    source, target = str(ROOT), config["site_dir"]
    pages = [
        File(path.as_posix(), source, target, config["use_directory_urls"]) for path in site_paths()
    ]
    return Files([*theme, *pages])
