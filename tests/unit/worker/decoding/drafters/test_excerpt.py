from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.decoding.drafters.draft_model import NUM_FIRST, Excerpt, excerpt


@given(data=st.data(), length=st.integers(0, 60), num_kept=st.integers(0, 40), num_more=st.integers(0, 10))
def test_it_is_the_list_without_its_middle(data: st.DataObject, length: int, num_kept: int, num_more: int) -> None:
    text = list(range(length))
    read = Excerpt(text, num_kept)
    first = min(NUM_FIRST, num_kept)
    expected = list(text) if length <= num_kept else [*text[:first], *text[length - num_kept + first :]]
    for token in range(length, length + num_more):
        text.append(token)
        expected = [*expected, token]
    assert list(read) == expected
    assert len(read) == len(expected)
    cut = data.draw(st.slices(max(1, len(expected))))
    assert read[cut] == expected[cut]
    for index in range(-len(expected), len(expected)):
        assert read[index] == expected[index]


def test_what_may_be_read_whole_is_the_list_itself() -> None:
    text = [1, 2, 3]
    assert excerpt(text, None) is text
    assert excerpt(text, 3) is text
    assert list(excerpt([*range(20)], 6)) == [0, 1, 2, 3, 18, 19]
