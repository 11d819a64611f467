"""What the pages look like: a real Chromium opens each of them, in the light, in the dark and on a phone."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, sync_playwright

from alphaloop.errors import StartFailed

#: Programs under which a system's Chromium is found.
PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")
_COLOURS: Final = 64  # of a picture, which keeps it small
#: Beside the pictures: what each page names. While pages name the same, their pictures are of today.
LABELS: Final = "labels.json"
_NAMES: Final = "nav a, main :is(h2, thead th, dt, legend, button)"


@dataclass(frozen=True, slots=True)
class Look:
    """How a page is looked at: what its picture's name ends with, the window, and the light."""

    suffix: str
    width: int
    height: int
    is_dark: bool


LOOKS: Final = (
    Look("", 1280, 860, is_dark=False),
    Look("-dark", 1280, 860, is_dark=True),
    Look("-phone", 390, 844, is_dark=False),
)


def find_chromium() -> str | None:
    """The program; None where there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window. Raises StartFailed where the system has none."""
    program = find_chromium()
    if program is None:
        raise StartFailed("no Chromium was found", hint="Debian: apt install chromium")
    with sync_playwright() as play:
        # Without its sandbox, because containers run it as root; it sees only our pages.
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


def take(browser: Browser, url: str, folder: Path, pages: Mapping[str, str], password: str) -> Iterator[Path]:
    """Take pictures of these pages, by name their addresses, into a folder; the paths, as they are written.

    The last file, LABELS, has the headings, columns and buttons of each page. Raises RuntimeError where the browser
    complains about a page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    complaints: list[str] = []
    opened: dict[Look, Page] = {}
    labels: dict[str, list[str]] = {}
    for look in LOOKS:
        opened[look] = _signed_in(
            browser, look, url, found := folder / f"sign-in{look.suffix}.png", password, complaints
        )
        yield found
    for name, path in pages.items():
        for look, page in opened.items():  # one after the other, so that the three show the same moment
            settle(page, url + path)
            if page.locator("[data-stream]").count():
                page.wait_for_function("() => document.querySelector('[data-stream]').textContent.length > 100")
            _save(page, found := folder / f"{name}{look.suffix}.png")
            if complaints:
                raise RuntimeError(f"{path}: {complaints}")
            yield found
        labels[name] = sorted({" ".join(text.split()) for text in opened[LOOKS[0]].locator(_NAMES).all_inner_texts()})
    for page in opened.values():
        page.context.close()
    (folder / LABELS).write_text(json.dumps(labels, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    yield folder / LABELS


def settle(page: Page, address: str) -> None:
    """Open a page once its figures were read, which happens in the background. Raises RuntimeError after a minute."""
    page.goto(address)
    if page.locator("script[src]").count() == 0:
        return  # a report, which has no twin and no script
    # Not wait_for_function, which takes the promise of an answer for an answer.
    is_read = page.evaluate(
        """async () => {
            for (const end = Date.now() + 60_000; Date.now() < end;) {
                const answer = await fetch(document.querySelector('footer a').href)
                const data = await answer.json()
                if (data.read_at !== null && data.explained_at !== null) return true
                await new Promise((go) => setTimeout(go, 100))
            }
            return false
        }"""
    )
    if not is_read:
        raise RuntimeError(f"{address}: its figures were not read within a minute")
    page.goto(address)


def _signed_in(browser: Browser, look: Look, url: str, picture: Path, password: str, complaints: list[str]) -> Page:
    size: ViewportSize = {"width": look.width, "height": look.height}
    context = browser.new_context(viewport=size, color_scheme="dark" if look.is_dark else "light")
    context.on("console", partial(_note, complaints))
    page = context.new_page()
    page.goto(f"{url}/sign-in")
    _save(page, picture)
    page.get_by_label("Name").fill("alphaloop")
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{url}/")
    return page


def _note(complaints: list[str], message: ConsoleMessage) -> None:
    complaints.append(message.text)


def _save(page: Page, path: Path) -> None:
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture.convert("RGB").quantize(_COLOURS).save(path, optimize=True)
