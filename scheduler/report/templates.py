"""The templates of pages: everything from outside is escaped."""

from __future__ import annotations

from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template


def template(name: str) -> Template:
    """A template of this package, such as `page.html.j2`."""
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def _source(name: str) -> str:
    return resources.files("scheduler.report").joinpath(name).read_text(encoding="utf-8")
