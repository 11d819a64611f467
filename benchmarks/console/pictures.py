"""What the pages look like: a real Chromium opens each of them, in the light, in the dark and on a phone."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from alphaloop.errors import StartFailed

#: Programs under which a system's Chromium is found.
PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")
_SCREEN: Final = (1280, 860)
_PHONE: Final = (390, 844)
_COLOURS: Final = 128  # of a picture, which keeps it small


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture: of which page, in which light, on a screen or a phone."""

    name: str
    path: str
    is_dark: bool = False
    is_phone: bool = False


SHOTS: Final = (
    Shot("now", "/"),
    Shot("tasks-dark", "/tasks", is_dark=True),
    Shot("task", "/tasks/code"),
    Shot("tasks-phone", "/tasks", is_phone=True),
    Shot("drift-dark-phone", "/drift", is_dark=True, is_phone=True),
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


def take(browser: Browser, url: str, folder: Path, shots: Sequence[Shot] = SHOTS) -> list[Path]:
    """Take the pictures into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for shot in shots:
        width, height = _PHONE if shot.is_phone else _SCREEN
        page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme="dark" if shot.is_dark else "light"
        )
        settle(page, url + shot.path)
        picture = Image.open(io.BytesIO(page.screenshot()))
        path = folder / f"{shot.name}.png"
        picture.convert("RGB").quantize(_COLOURS).save(path, optimize=True)
        found.append(path)
        page.close()
    return found


def settle(page: Page, address: str) -> None:
    """Open a page once its figures were read, which happens in the background."""
    page.goto(address)
    page.wait_for_function(
        """async () => {
            const answer = await fetch(document.querySelector('footer a').href)
            const data = await answer.json()
            return data.read_at !== null && data.explained_at !== null
        }"""
    )
    page.goto(address)
