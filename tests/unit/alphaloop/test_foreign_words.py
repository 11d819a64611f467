"""Foreign texts on screens: what acts is written out, everything else stays."""

from __future__ import annotations

import io
import json

import pytest
from rich.text import Text

from alphaloop.cli.screen import _console, table
from alphaloop.wording import harmless, json_text, one_line


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("\x1b]0;X\x07", "\\x1b]0;X\\x07"),
        ("a\x9bb\x7f", "a\\x9bb\\x7f"),
        ("a\u202eb\u2066\u200f", "a\\u202eb\\u2066\\u200f"),
        ("one\ttwo\nthree\r\nfour\rfive", "one\ttwo\nthree\nfour\\x0dfive"),
        ("日本語 é 👩‍👩‍👧 שלום", "日本語 é 👩‍👩‍👧 שלום"),
        ("half \ud83d", "half \\ud83d"),
    ],
)
def test_what_acts_is_written_out(given: str, shown: str) -> None:
    assert harmless(given) == shown
    assert one_line(given) == shown.replace("\n", "\\n").replace("\t", "\\t")


def test_json_stays_the_same_value() -> None:
    value = {"a\u202e": ["\x7f\x9b\x1b\n\t", "é 語", "\ud83d"]}
    encoded = json_text(value, indent=2)
    assert json.loads(encoded) == value
    assert "é 語" in encoded
    assert not set("\u202e\x7f\x9b\x1b\t\ud83d") & set(encoded)


def test_a_console_shows_texts_and_tables_without_their_acts_and_markup() -> None:
    screen = _console(io.StringIO())
    shown = table("[red]name", "text", title="\x1b[2J")
    shown.add_row("[bold]x[/bold]", Text("\x1b]0;X\x07", style="red"))
    for one in (shown, "[red]\u202e :smile:", Text("\x9b31m")):
        screen.print(one)
    found = screen.file.getvalue()  # type: ignore[attr-defined]
    assert not set("\x1b\x07\u202e\x9b") & set(found)
    for told in ("[red]name", "[bold]x[/bold]", "\\x1b", "]0;X", "[red]\\u202e :smile:", "\\x9b31m", "\\x1b[2J"):
        assert told in found
