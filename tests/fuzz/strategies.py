"""Hypothesis' messages: any JSON under the names of a job's fields, and any bytes. It shrinks what it finds."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.fuzz.hostile import NUMBERS, STRINGS, Raw, write
from tests.fuzz.mutations import NAMES

_SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=50),
    st.text(st.characters(), max_size=20),
    st.sampled_from(STRINGS),
    st.sampled_from(NUMBERS).map(Raw),
)
_NAMES: st.SearchStrategy[str] = (
    st.sampled_from(NAMES) | st.sampled_from(["role", "content", "type"]) | st.text(max_size=9)
)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=6), max_leaves=12
)
_PROMPTS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"prompt": "x"}),
    st.just({"body": {"prompt": "x"}}),
    st.builds(
        lambda content: {"messages": [{"role": "user", "content": content}]},
        st.text(max_size=40),
    ),
)
_JOBS: st.SearchStrategy[Any] = st.builds(
    lambda prompt, fields, over: fields | prompt if over else prompt | fields,
    _PROMPTS,
    st.dictionaries(st.sampled_from(NAMES), _VALUES, max_size=2),
    st.booleans(),
)

_WRITTEN_JOBS: st.SearchStrategy[bytes] = st.builds(
    lambda job, is_ascii: write(job, is_ascii=is_ascii).encode("utf-8", "surrogatepass"), _JOBS, st.booleans()
)

#: The value of a message, or none.
MESSAGES: st.SearchStrategy[bytes | None] = st.one_of(
    st.none(),
    st.binary(max_size=64),
    _VALUES.map(lambda value: write(value).encode()),
    _WRITTEN_JOBS,
    _PROMPTS.map(lambda job: write(job).encode()),
)
