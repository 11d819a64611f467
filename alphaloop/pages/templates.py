"""The templates of pages: everything from outside is escaped."""

from __future__ import annotations

from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


@cache
def environment(package: str, folder: str = ".") -> Environment:
    """The templates in a folder of a package; they can include `style.css`, the style of every page."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(package, folder), PackageLoader("alphaloop.pages", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
