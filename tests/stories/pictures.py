"""The last report as a person sees it: in the light, in the dark and on a phone, in a headless Chromium."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from PIL import Image

from benchmarks.console.pictures import chromium, find_chromium

_COLOURS: Final = 32  # of a picture, which keeps it small


@dataclass(frozen=True, slots=True)
class _Look:
    name: str
    width: int
    is_dark: bool = False


_LOOKS: Final = (_Look("light", 1000), _Look("dark", 1000, is_dark=True), _Look("phone", 390))


def take_pictures(page: Path, folder: Path) -> list[Path]:
    """Pictures of the whole page; none where the system has no Chromium."""
    if find_chromium() is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    with chromium() as browser:
        for look in _LOOKS:
            shown = browser.new_page(
                viewport={"width": look.width, "height": 900}, color_scheme="dark" if look.is_dark else "light"
            )
            shown.goto(page.as_uri())
            picture = Image.open(io.BytesIO(shown.screenshot(full_page=True)))
            path = folder / f"{look.name}.png"
            picture.convert("RGB").quantize(_COLOURS).save(path, optimize=True)
            found.append(path)
            shown.close()
    return found
