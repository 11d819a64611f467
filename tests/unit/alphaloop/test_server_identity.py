"""When two identities of a server are one server, what is said where they are not, and how its texts were counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alphaloop.server_identity import Continuation, ServerIdentity, change_between, differs, distance, how_counted

PARIS = {" Paris": -0.27, " the": -2.71, " London": -4.46}


def moved(by: float) -> tuple[Continuation, ...]:
    return tuple(Continuation(" Paris.", {token: value + by for token, value in PARIS.items()}) for _ in range(16))


FOUND = ServerIdentity("vllm-0.32.0", "smollm2", "/models/smollm2", 2048, moved(0))


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (replace(FOUND, server="vllm-0.33.0"), "from vllm-0.32.0 to vllm-0.33.0"),
        (replace(FOUND, model="qwen"), "qwen in place of smollm2"),
        (replace(FOUND, root="/models/v2"), "/models/v2 in place of /models/smollm2"),
        (replace(FOUND, context_length=None), "from 2048 to an unknown number of tokens"),
        (replace(FOUND, answers=moved(0.04)), "moved by 0.04"),
        (replace(FOUND, answers=moved(-0.5)), "as another model does"),
    ],
)
def test_each_change_is_named(after: ServerIdentity, words: str) -> None:
    told = str(differs(FOUND, after))
    assert words in told
    assert ";" not in told, "and nothing else"


def test_a_server_that_does_not_tell_its_folder_has_not_moved_it() -> None:
    assert differs(FOUND, replace(FOUND, root=None)) is None


def test_what_a_servers_own_answers_scatter_is_no_change() -> None:
    """On a GPU probabilities depend on what else is in the batch."""
    assert differs(replace(FOUND, scatter=0.02), replace(FOUND, answers=moved(0.05))) is None
    told = change_between(replace(FOUND, scatter=0.02), replace(FOUND, answers=moved(0.07)))
    assert not told.is_of_weights


def test_a_token_that_falls_out_of_the_list_counts_little_and_other_tokens_count_much() -> None:
    fell_out = Continuation("", {" Paris": -0.27, " the": -2.71, " Le": -4.5})
    near = distance([FOUND.answers[0]], [fell_out])
    other = distance([FOUND.answers[0]], [Continuation("", {" Rom": -0.1, " a": -3.0, " an": -4.0})])
    assert near < 0.03 < 0.3 < other


def test_without_probabilities_only_many_other_texts_are_another_model() -> None:
    told = replace(FOUND, answers=tuple(Continuation(f"text {n}", {}) for n in range(16)))
    some = replace(FOUND, answers=tuple(Continuation(f"text {n if n > 4 else -1}", {}) for n in range(16)))
    many = replace(FOUND, answers=tuple(Continuation(f"text {n if n > 5 else -1}", {}) for n in range(16)))
    assert distance(told.answers, some.answers) is None
    assert differs(told, some) is None
    assert change_between(told, many).is_of_weights  # type: ignore[union-attr]
    assert "6 of 16 short texts" in str(differs(told, many))


def test_what_is_seen_first_gives_a_name_that_depends_on_it() -> None:
    assert FOUND.sha256() == replace(FOUND, root="/elsewhere").sha256()
    assert FOUND.sha256() != replace(FOUND, answers=moved(0.01)).sha256()


@pytest.mark.parametrize(
    ("draft_revision", "said"),
    [
        ("llama_cpp-b11549-sums", "positions estimated"),
        ("llama_cpp-b11549-counters", "positions estimated"),
        ("sglang-0.5.23-reached", "of positions reached"),
        ("vllm-0.32.0-counters", ""),
        ("vllm-0.32.0", ""),
        ("1f0c3a59d2b7e684", ""),
    ],
)
def test_a_revision_says_how_texts_under_it_were_counted(draft_revision: str, said: str) -> None:
    assert how_counted(draft_revision) == said
