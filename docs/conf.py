"""The documentation as a site: `make docs` builds it with Sphinx, and fails on every warning.

The sources are the repository's Markdown as it stands: a page and its links read the same there. Nothing on a page is
fetched from elsewhere: the fonts are the reader's own, and the search index lies beside the pages.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Final

from sphinx.application import Sphinx

from alphaloop import __version__

ROOT: Final = Path(__file__).resolve().parents[1]

project = "alphaloop"
release = version = __version__
extensions = ["myst_parser"]
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "engine/README.md",
    "examples/README.md",
    "docs/**",
]
exclude_patterns = [".*", "build", "docs/site"]  # folders in which nothing needs to be looked for

html_theme = "furo"
html_title = f"alphaloop {release}"
html_static_path = ["site/static"]
templates_path = ["site/templates"]
html_css_files = ["site.css"]
html_favicon = "../alphaloop/console/static/icon.svg"
html_additional_pages = {"index": "to_first_page.html"}
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options: dict[str, object] = {"footer_icons": []}
pygments_style, pygments_dark_style = "sphinx", "github-dark"

myst_heading_anchors = 4  # as on GitHub
nitpicky = True
suppress_warnings = ["misc.highlighting_failure"]  # Pygments does not know the newest Java; it still colours it

#: By heading: pages in the order in which they are read, then all others of the folder.
NAVIGATION: Final = {
    "Start": [
        "docs/README",
        "examples/README",
        "engine/README",
        "docs/guides/enqueue",
        "docs/guides/measure",
        "docs/guides/console",
        "docs/guides/deploy",
    ],
    "Guides": [
        "docs/guides/streams",
        "docs/guides/batches",
        "docs/guides/openai-batches",
        "docs/guides/large-messages",
        "docs/guides/clients/README",
        "docs/guides/explain",
        "docs/guides/ask-the-database",
        "docs/guides/kubernetes",
        "docs/guides/operate",
        "docs/guides/notifications",
        "docs/guides/traces",
        "docs/guides/probes",
        "docs/guides/drafters",
        "docs/guides/train-a-draft",
        "docs/guides/gpus",
        "docs/guides/*",
    ],
    "Concepts": [
        "docs/glossary",
        "docs/concepts/flow",
        "docs/concepts/acceptance",
        "docs/concepts/deciding",
        "docs/concepts/switchback",
        "docs/concepts/expectations",
        "docs/concepts/drift",
        "docs/concepts/exactness",
        "docs/concepts/guarantees",
        "docs/concepts/*",
        "docs/derivations/*",
    ],
    "Reference": ["docs/reference/cli", "docs/reference/settings", "docs/reference/messages", "docs/reference/*"],
    "Project": [
        "docs/tour",
        "docs/results",
        "docs/decisions/README",
        "CHANGELOG",
        "CONTRIBUTING",
        "SECURITY",
        "docs/*",
    ],
}
#: READMEs whose folder stands below them.
FOLDERS: Final = ("docs/guides/clients/README", "docs/decisions/README")
_LINK: Final = re.compile(r"(?<=\]\()([^)\s#:]+)(?=\))")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _as_a_page)


def _as_a_page(app: Sphinx, name: str, source: list[str]) -> None:
    """A link to a folder leads to its README, as on GitHub; READMEs also carry the navigation."""
    folder = (ROOT / name).parent
    trees = _navigation() if name == root_doc else ""
    if name in FOLDERS:
        trees = _tree(_pages(f"{folder.relative_to(ROOT)}/*"))

    def in_folder(link: re.Match[str]) -> str:
        found = folder / link.group()
        return f"{link.group().rstrip('/')}/README.md" if (found / "README.md").is_file() else link.group()

    source[0] = _LINK.sub(in_folder, source[0]) + trees
    if name == "docs/concepts/guarantees":
        source[0] += _guarding_tests()


def _guarding_tests() -> str:
    """Every promise with the fault that tests inject and these tests, as tables, from tests/guarantees.toml."""
    listed = tomllib.loads((ROOT / "tests/guarantees.toml").read_text(encoding="utf-8"))["guarantee"]
    lines = []
    for about, found in groupby(listed, key=lambda one: one["about"]):
        lines += ["", f"## {about}", "", "| promise | fault | test |", "|---|---|---|"]
        for one in found:
            parts = [test.split("::") for test in one["tests"]]
            tests = [(part[-1] if len(part) > 1 else Path(part[0]).stem, part[0]) for part in parts]
            links = "<br>".join(f"[`{test}`](../../{path})" for test, path in tests)
            lines.append(f"| {one['promise']} | {one['fault']} | {links} |")
    return "\n".join(lines) + "\n"


def _navigation() -> str:
    listed: dict[str, None] = {}
    trees = []
    for heading, patterns in NAVIGATION.items():
        pages = dict.fromkeys(page for pattern in patterns for page in _pages(pattern) if page not in listed)
        listed |= pages
        trees.append(_tree(pages, heading))
    return "".join(trees)


def _tree(pages: Iterable[str], heading: str = "") -> str:
    """A toctree that is seen in the sidebar only; the pages are named from the repository's root."""
    options = ":hidden:\n:titlesonly:\n" + (f":caption: {heading}\n" if heading else "")
    names = "\n".join(f"/{page}" for page in pages)
    return f"\n\n```{{toctree}}\n{options}\n{names}\n```\n"


def _pages(pattern: str) -> list[str]:
    found = (str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob(f"{pattern}.md"))
    return sorted(page for page in found if not (pattern.endswith("*") and page.endswith("/README")))
