"""The documents as a site: what `make docs` refuses, and that it lists every page. CI builds the site itself."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "scripts/check_site.py"
PAGE = '<html><head><link rel="stylesheet" href="{style}"></head><body id="top">{body}</body></html>'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "style.css").write_text("body { background: url(data:image/png;base64,AA) }")
    (tmp_path / "in").mkdir()
    second = PAGE.format(style="../style.css", body='<h2 id="α">α</h2><a href="../first.html#top">up</a>')
    (tmp_path / "in/second page.html").write_text(second)
    return tmp_path


def checked(site: Path, body: str) -> tuple[int, str]:
    (site / "first.html").write_text(PAGE.format(style="style.css", body=body))
    ended = subprocess.run([sys.executable, PROGRAM, site], capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr


def test_a_site_whose_links_lead_somewhere_passes(site: Path) -> None:
    good = (
        '<a href="in/second%20page.html#%CE%B1">α</a> <a href="#top">top</a> <a href="https://elsewhere.example/">e</a>'
    )
    assert checked(site, good) == (0, "")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('<a href="in/third.html">x</a>', "no such page: in/third.html"),
        ('<a href="in/second%20page.html#b">x</a>', "no such heading: in/second%20page.html#b"),
        ('<a href="#nowhere">x</a>', "no such heading: #nowhere"),
        ('<img src="https://cdn.example/a.png">', "fetches https://cdn.example/a.png"),
        ('<script src="//cdn.example/a.js"></script>', "fetches //cdn.example/a.js"),
        ('<link rel="stylesheet" href="https://fonts.example/css">', "fetches https://fonts.example/css"),
        ('<img src="gone.png">', "no such file: gone.png"),
    ],
)
def test_a_fault_is_named_with_its_page(site: Path, body: str, told: str) -> None:
    code, said = checked(site, body)
    assert code == 1
    assert f"first.html: {told}\n" in said


def test_a_style_that_fetches_is_refused(site: Path) -> None:
    (site / "style.css").write_text('@import "https://fonts.example/css"; b { background: url("//cdn.example/b.png") }')
    code, said = checked(site, "")
    assert code == 1
    assert "style.css: fetches https://fonts.example/css" in said
    assert "style.css: fetches //cdn.example/b.png" in said


def test_a_folder_without_pages_is_no_site(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, PROGRAM, tmp_path], capture_output=True, text=True, check=False)
    assert (ended.returncode, "found no page" in ended.stderr) == (1, True)


def test_the_navigation_has_every_page_once() -> None:
    settings = runpy.run_path(str(ROOT / "docs/conf.py"))
    listed = [line.lstrip("/") for line in settings["_navigation"]().splitlines() if line.startswith("/")]
    assert len(listed) == len(set(listed))
    below = [page for folder in settings["FOLDERS"] for page in settings["_pages"](f"{Path(folder).parent}/*")]
    pages = {str(page.relative_to(ROOT).with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages | {"CHANGELOG", "CONTRIBUTING", "SECURITY", "engine/README", "examples/README"} == {*listed, *below}
