"""The last report as a person sees it: in the light, in the dark and on a phone, in a headless Chromium."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final, Literal

from PIL import Image

from benchmarks.console.pictures import chromium, find_chromium

_COLOURS: Final = 32  # of a picture, which keeps it small
#: Name of the picture, width of the window, and the light.
_LOOKS: Final[tuple[tuple[str, int, Literal["light", "dark"]], ...]] = (
    ("light", 1000, "light"),
    ("dark", 1000, "dark"),
    ("phone", 390, "light"),
)


def take_pictures(page: Path, folder: Path) -> list[Path]:
    """Pictures of the whole page; none where the system has no Chromium."""
    if find_chromium() is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    with chromium() as browser:
        for name, width, light in _LOOKS:
            shown = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=light)
            shown.goto(page.as_uri())
            picture = Image.open(io.BytesIO(shown.screenshot(full_page=True)))
            found.append(folder / f"{name}.png")
            picture.convert("RGB").quantize(_COLOURS).save(found[-1], optimize=True)
            shown.close()
    return found
