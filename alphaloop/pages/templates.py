"""The templates of pages: everything from outside is escaped."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from alphaloop.wording import harmless


def _shown(value: Any) -> Any:
    """A text from outside without what turns the direction of the text around it; markup as it is.

    A field of a form gives back what it was given, so its value goes through `e`, which makes markup of it.
    """
    return harmless(value) if type(value) is str else value


@cache
def environment(package: str, folder: str = ".") -> Environment:
    """The templates in a folder of a package; they can include `style.css`, the style of every page."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(package, folder), PackageLoader("alphaloop.pages", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
