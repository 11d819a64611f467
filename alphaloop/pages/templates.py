"""The templates of pages: everything from outside is escaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from alphaloop.as_decoded import at_load, drafted_by_load, drafted_sentence, percent, setting
from alphaloop.experiment.wording import computed, control, draft_lengths, figure, load, ratio, why, why_then
from alphaloop.pages.drawing import alpha_over_time, sparkline
from alphaloop.wording import (
    acceptance_of,
    counted_apart,
    counts,
    harmless,
    named,
    rate,
    sentence,
    share,
    share_with_interval,
    words,
)


def _shown(value: Any) -> Any:
    """A text from outside without what turns the direction of the text around it; markup as it is.

    A field of a form gives back what it was given, so its value goes through `e`, which makes markup of it.
    """
    return harmless(value) if type(value) is str else value


#: What every page writes and draws with.
_WORDS: Final[Mapping[str, Callable[..., Any]]] = {
    function.__name__: function
    for function in (
        acceptance_of,
        alpha_over_time,
        at_load,
        computed,
        control,
        counted_apart,
        counts,
        draft_lengths,
        drafted_by_load,
        drafted_sentence,
        figure,
        load,
        named,
        percent,
        rate,
        ratio,
        sentence,
        setting,
        share,
        share_with_interval,
        sparkline,
        why,
        why_then,
        words,
    )
}


@cache
def environment(package: str, folder: str = ".") -> Environment:
    """The templates in a folder of a package; they may include `style.css`, and write with the words of every page."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package, folder), PackageLoader("alphaloop.pages", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(_WORDS)
    return made
