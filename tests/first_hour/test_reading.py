"""The walk's own parts: pages become steps, what is printed is compared, a terminal is typed into."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.first_hour.comparing import difference
from tests.first_hour.pages import ROOT, steps
from tests.first_hour.walk import PAGES

GUIDES: Final = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize(("language", "order"), [("sh", "yes"), ("text", "needs kcat"), ("json", "no, why"), ("", "x")])
def test_a_comment_that_is_not_understood_is_told(tmp_path: Path, language: str, order: str) -> None:
    (tmp_path / "page.md").write_text(f"<!-- walk: {order} -->\n```{language}\nx\n```\n")
    with pytest.raises(ValueError, match=re.escape(f"page.md:2: a block of {language or 'no language'} cannot")):
        steps("page.md", root=tmp_path)


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        ("1 sent; 64 tokens in 1.4 s", "13 sent; 7 tokens in 12 s\n", None),
        ("k   α\n12  .79", "k  α\n 4  1.00\n", "the line '12  .79'"),
        ("k  α\n12 .79", "k      α\n4     .8", None),
        ("…\n1 sent", "def fib(n):\n\n1 sent", None),
        ("job … ended", "job order-17 ended", None),
        ("1 sent", "1 sent\n2 wrong", "the end"),
        ("1 sent\n2 wrong", "1 sent", "the line '2 wrong'"),
        ("1 sent", "none sent", "the line '1 sent'"),
        ("a.b", "acb", "the line 'a.b'"),
    ],
)
def test_figures_differ_and_words_do_not(shown: str, printed: str, missing: str | None) -> None:
    found = difference(shown, printed)
    assert found is None if missing is None else found is not None and found.startswith(missing), found


@pytest.mark.parametrize("page", PAGES)
def test_no_command_of_a_walked_page_is_left_out(page: str) -> None:
    """Commands stand in blocks of `sh`: what is in another block, nobody types."""
    text = (ROOT / page).read_text(encoding="utf-8")
    steps(page)
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language != "sh":
            assert not re.search(r"^(?:\S*/)?(?:alphaloop|make|kcat|psql|curl) ", block, re.MULTILINE), block
