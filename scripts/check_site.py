"""Check a built site: check_site.py FOLDER. Every link leads to a page and a heading that are there; no page fetches.

A link to another site may be followed by a reader; a style, script, font or picture of another site would be fetched.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Attributes whose address a browser fetches by itself.
_FETCHED = {"img": "src", "script": "src", "iframe": "src", "source": "srcset", "video": "src", "link": "href"}
#: Relations of <link> that fetch nothing.
_ONLY_TOLD = frozenset({"canonical", "next", "prev", "search", "index", "help", "author", "license"})
_STYLE_URL = re.compile(r"@import\s+['\"]([^'\"]+)|url\(\s*['\"]?(?!data:)([^'\")]+)")


@dataclass
class Page(HTMLParser):
    """The addresses on a page, and where a link may lead to."""

    path: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect ids, links, and what is fetched."""
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        is_told = tag == "link" and set(found.get("rel", "").split()) & _ONLY_TOLD
        if (attribute := _FETCHED.get(tag)) and attribute in found and not is_told:
            self.fetched.append(found[attribute])


def faults(folder: Path) -> list[str]:
    """What is wrong with the site, a line a fault."""
    pages = {path: Page(path) for path in sorted(folder.rglob("*.html"))}
    found = [] if pages else [f"{folder}: expected a built site, found no page"]
    for path, page in pages.items():
        name = path.relative_to(folder)
        found += [f"{name}: {told}" for link in page.links if (told := _wrong(path, link, pages))]
        found += [f"{name}: fetches {address}" for address in page.fetched if _is_elsewhere(address)]
        found += [f"{name}: no such file: {a}" for a in page.fetched if not _is_elsewhere(a) and not _file(path, a)]
    for style in sorted(folder.rglob("*.css")):
        addresses = (one or other for one, other in _STYLE_URL.findall(style.read_text(encoding="utf-8")))
        found += [f"{style.relative_to(folder)}: fetches {a}" for a in addresses if _is_elsewhere(a)]
    return found


def _is_elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def _file(page: Path, address: str) -> Path | None:
    """The file of an address on a page; None without one."""
    path = unquote(urlsplit(address).path)
    found = (page.parent / path).resolve() if path else page.resolve()
    return found if found.is_file() else None


def _wrong(page: Path, link: str, pages: dict[Path, Page]) -> str | None:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = _file(page, link)
    if target is None:
        return f"no such page: {link}"
    anchors = pages.get(target)
    if parts.fragment and anchors is not None and unquote(parts.fragment) not in anchors.ids:
        return f"no such heading: {link}"
    return None


def main() -> None:
    """Print the faults, and fail if there are any."""
    if len(sys.argv) != 2:
        sys.exit("usage: check_site.py FOLDER")
    found = faults(Path(sys.argv[1]).resolve())
    for one in found:
        sys.stderr.write(f"{one}\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
