"""Text that grows token by token, whatever the tokenizer: whole characters, exact ends, the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.text import UNREADABLE, WINDOW, TextStream, byte_tokens, special_tokens, token_bytes
from tests.fixtures.models import CJK, TOKENIZERS, byte_fallback, bytes_learnt

relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


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


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4), st.booleans())
@example("ab", ["b"], False)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(
    written: str, stop: list[str], is_live: bool
) -> None:
    text = TextStream(characters, stop, is_live=is_live)
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


WRITTEN: Final = st.text(
    st.one_of(st.sampled_from("the def\n  =+(a)"), st.sampled_from(CJK + "é€😀\ufffd"), st.characters(codec="utf-8")),
    max_size=60,
)
NAMES: Final = tuple(TOKENIZERS)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: make() for name, make in TOKENIZERS.items()}


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def new_stream(
    tokenizer: Any, stop: Sequence[str] = (), *, is_live: bool = True, before: Sequence[int] = ()
) -> TextStream:
    return TextStream(
        lambda ids: decode(tokenizer, ids),
        stop,
        is_live=is_live,
        before=before,
        byte_tokens=byte_tokens(tokenizer),
        special_tokens=special_tokens(tokenizer),
    )


def encode(tokenizer: Any, written: str) -> list[int]:
    return list(tokenizer(written, add_special_tokens=False)["input_ids"])


def pieces(text: TextStream, token_ids: Sequence[int], chunks: Random) -> list[str]:
    """The deltas of a text whose tokens come in chunks."""
    deltas = []
    for token_id in token_ids:
        assert not text.push(token_id)
        if chunks.random() < 0.5:
            deltas.append(text.take_delta())
    assert not text.finish()
    return [*deltas, text.take_delta()]


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(WRITTEN, st.randoms(use_true_random=False))
@example("日本語日本語", Random(1))
@example("the " + "日本語" * 20 + " the", Random(2))
@example(CJK * 8, Random(3))
def test_pieces_are_together_what_the_tokens_decode_to(
    tokenizers: dict[str, Any], name: str, written: str, chunks: Random
) -> None:
    tokenizer = tokenizers[name]
    token_ids = encode(tokenizer, written)
    whole = decode(tokenizer, token_ids)
    never = "\x00never"
    for stop, is_live in (((), True), ((never,), True), ((never,), False), ((), False)):
        text = new_stream(tokenizer, stop, is_live=is_live)
        deltas = pieces(text, token_ids, chunks)
        assert "".join(deltas) == text.text == whole
        assert is_live or not any(deltas[:-1]) or stop


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(st.lists(st.integers(0, 1000), max_size=3 * WINDOW), st.randoms(use_true_random=False))
@example([280, *[-1] * 2 * WINDOW, 280, 281], Random(10))
@example([195, 907, 129], Random(11))
def test_any_tokens_give_one_text_whether_it_streams_or_not(
    tokenizers: dict[str, Any], name: str, numbers: list[int], chunks: Random
) -> None:
    """Decoding at once makes every byte of a run U+FFFD where one is broken; a stream keeps what can be read."""
    tokenizer = tokenizers[name]
    # Models have more tokens than their tokenizers: the highest ones have no text.
    token_ids = [number % (len(tokenizer) + 20) for number in numbers]
    streamed, stored = new_stream(tokenizer), new_stream(tokenizer, is_live=False)
    assert "".join(pieces(streamed, token_ids, chunks)) == streamed.text
    pieces(stored, token_ids, chunks)
    assert streamed.text == stored.text
    whole = decode(tokenizer, token_ids)
    if UNREADABLE not in whole or not name.startswith("byte_fallback"):
        assert streamed.text == whole


def test_bytes_that_cannot_be_read_leave_the_rest_of_their_run(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    broken = encode(tokenizer, "日")[:-1]
    token_ids = [*encode(tokenizer, "the 日本"), *broken[1:], *encode(tokenizer, "語")[1:], *broken[1:]]
    for is_live in (True, False):
        text = new_stream(tokenizer, is_live=is_live)
        pieces(text, token_ids, Random(4))
        assert text.text == f"the 日本{UNREADABLE}語{UNREADABLE}"


@pytest.mark.parametrize("name", NAMES[:4])
@relaxed
@given(st.tuples(WRITTEN, WRITTEN).filter(lambda both: both[0].strip() != ""), st.randoms(use_true_random=False))
@example(("def add", " = the"), Random(5))
@example(("日本語日本語", "日本語 the"), Random(6))
def test_a_continuation_is_what_stands_after_its_prompt(
    tokenizers: dict[str, Any], name: str, both: tuple[str, str], chunks: Random
) -> None:
    tokenizer = tokenizers[name]
    prompt = encode(tokenizer, both[0])
    token_ids = encode(tokenizer, "".join(both))
    if token_ids[: len(prompt)] != prompt or UNREADABLE in decode(tokenizer, prompt):
        return  # the prompt's last token goes on in the text
    for is_live in (True, False):
        text = new_stream(tokenizer, is_live=is_live, before=prompt)
        pieces(text, token_ids[len(prompt) :], chunks)
        assert decode(tokenizer, prompt) + text.text == decode(tokenizer, token_ids)


def test_the_first_space_of_a_continuation_is_text_and_may_begin_a_stop_string(tokenizers: dict[str, Any]) -> None:
    for name in ("byte_fallback", "metaspace"):
        tokenizer = tokenizers[name]
        prompt, both = encode(tokenizer, "def add"), encode(tokenizer, "def add = the")
        assert both[: len(prompt)] == prompt
        for is_live in (True, False):
            text = new_stream(tokenizer, is_live=is_live, before=prompt)
            pieces(text, both[len(prompt) :], Random(7))
            assert text.text == " = the"
        text = new_stream(tokenizer, [" ="], before=prompt)
        assert any(map(text.push, both[len(prompt) :]))
        assert text.text == ""


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize(
    ("stop", "written", "seen"),
    [
        ("<|x|>", "the <|x|>the", "the "),
        ("\n<|x|>", "the<|x|>the\n<|x|>", "thethe"),
        ("the<|x|>", "the <|x|> the<|x|>", "the "),
        ("</s>", "add</s>", "add"),
    ],
)
def test_a_stop_string_may_have_special_tokens(
    tokenizers: dict[str, Any], name: str, stop: str, written: str, seen: str
) -> None:
    tokenizer = tokenizers[name]
    token_ids = encode(tokenizer, written)
    assert tokenizer.convert_tokens_to_ids("<|x|>") in token_ids or stop == "</s>"
    text = new_stream(tokenizer, [stop])
    deltas, _ = stream(text, token_ids)
    assert text.is_stopped
    # SentencePiece's normalizer puts a space before what follows a special token.
    assert "".join(deltas).replace(" ", "") == text.text.replace(" ", "") == seen.replace(" ", "").removesuffix("\n")
    unstopped = new_stream(tokenizer, ["\x00never"])
    pieces(unstopped, token_ids, Random(8))
    assert unstopped.text == decode(tokenizer, token_ids)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_costs_the_same_in_a_long_text(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer = tokenizers[name]
    num_decoded = 0

    def counted(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(tokenizer, token_ids)

    token_ids = encode(tokenizer, f"the {CJK} <|x|><|x|>" * 100)
    text = TextStream(counted, byte_tokens=byte_tokens(tokenizer), special_tokens=special_tokens(tokenizer))
    pieces(text, token_ids, Random(9))
    assert text.text == decode(tokenizer, token_ids)
    assert num_decoded <= (WINDOW + 1) * len(token_ids)


def test_the_bytes_of_tokens_are_known_where_a_vocabulary_lacks_bytes_that_no_text_has() -> None:
    whole = bytes_learnt([CJK * 3], 30, alphabet=[])
    assert len(whole.get_vocab()) < 256
    tokens = whole(CJK)["input_ids"]
    assert any(UNREADABLE in whole.decode([token]) for token in tokens), "a token ends within a character"
    assert b"".join(token_bytes(whole, token) for token in tokens) == CJK.encode()


def test_a_letter_of_a_byte_fallback_vocabulary_is_that_letter() -> None:
    """Also where the vocabulary has every letter in which byte-level vocabularies are written."""
    made = byte_fallback(is_prefixed=False)
    added = [letter for letter in bytes_to_unicode().values() if letter not in made.get_vocab()]
    made.add_tokens([AddedToken(letter, normalized=False) for letter in added])
    assert token_bytes(made, made.convert_tokens_to_ids("é")) == "é".encode()
