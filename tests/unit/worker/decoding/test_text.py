"""Text that grows token by token: whole characters, exact ends, the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker.decoding.text import UNREADABLE, TextStream

relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
SCRIPTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("aé€😀 \n\t")), max_size=80)


def characters(token_ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are characters."""
    return "".join(map(chr, token_ids))


def stream(text: TextStream, token_ids: Sequence[int]) -> tuple[list[str], int]:
    """The deltas, the last one from `finish`, and how many tokens were pushed."""
    deltas, num = [], 0
    for token_id in token_ids:
        num += 1
        if text.push(token_id):
            break
        deltas.append(text.take_delta())
    text.finish()
    return [*deltas, text.take_delta()], num


@relaxed
@given(SCRIPTS)
def test_readable_text_arrives_whole_and_without_broken_characters(tiny_tokenizer: Any, written: str) -> None:
    token_ids = tiny_tokenizer(written, add_special_tokens=False)["input_ids"]
    text = TextStream(lambda ids: tiny_tokenizer.decode(ids, skip_special_tokens=True))
    deltas, _ = stream(text, token_ids)
    assert "".join(deltas) == text.text == written
    assert all(delta.count(UNREADABLE) <= written.count(UNREADABLE) for delta in deltas)


def test_a_stop_string_is_found_whether_anybody_watches_or_not() -> None:
    for is_live in (True, False):
        text = TextStream(characters, ["b"], is_live=is_live)
        assert [text.push(ord(character)) for character in "ab"] == [False, True]
        assert text.text == "a"


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4))
def test_the_text_ends_before_the_stop_string_that_is_complete_first(written: str, stop: list[str]) -> None:
    text = TextStream(characters, stop)
    deltas, num = stream(text, [ord(character) for character in written])
    ends = [end for end in range(1, len(written) + 1) if any(written[:end].endswith(s) for s in stop)]
    if ends:
        seen = written[: ends[0]]
        assert text.is_stopped
        assert num == ends[0]
        assert text.text == seen[: len(seen) - max(len(s) for s in stop if seen.endswith(s))]
    else:
        assert not text.is_stopped
        assert text.text == written
    assert "".join(deltas) == text.text


def test_an_end_that_may_become_a_stop_string_waits() -> None:
    text = TextStream(characters, ["###"])
    for character, delta in (("a", "a"), ("#", ""), ("#", ""), ("b", "##b"), ("#", "")):
        text.push(ord(character))
        assert text.take_delta() == delta
    assert not text.finish()
    assert text.take_delta() == "#"


def test_a_stop_string_in_what_waited_for_its_last_byte_still_stops() -> None:
    pieces = ["go ", "STOP" + UNREADABLE]
    text = TextStream(lambda ids: "".join(pieces[i] for i in ids), ["STOP"])
    assert not text.push(0)
    assert not text.push(1)
    assert text.finish()
    assert text.text == "go "


def test_a_token_that_brings_two_stop_strings_ends_before_the_earlier() -> None:
    text = TextStream(lambda ids: "one two three"[: 13 * len(ids)], ["three", "two"])
    assert text.push(0)
    assert text.text == "one "
