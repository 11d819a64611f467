"""Two tokenizers: which tokens both have, and a text of one in the tokens of the other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from alphaloop.deciding.goodput import DrafterState
from engine.drafters.draft_model import DraftModelDrafter
from engine.drafters.draft_vocabulary import DraftTokens
from engine.drafters.translation import SAMPLE, TranslatedText, Translation
from engine.text import token_bytes
from tests.fixtures.drafting import GREEDY, Model, ask, logits_behind
from tests.fixtures.models import CJK, LEARNT, TOKENIZERS, make_tiny_tokenizer, other_tokenizer

LETTERS: Final = "thedfaurn()+=,:b#oirg3AZ{}\"'_é" + CJK
#: As Llama 3, and with other numbers Qwen, cut texts before they merge bytes.
LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def cut_by_expression() -> Any:
    """Byte-level BPE with Llama 3's expression."""
    made = other_tokenizer()
    parts = [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return made


def unigrams() -> Any:
    """SentencePiece's unigrams, with every letter of the texts here."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    alphabet = sorted({*SAMPLE, *LETTERS, "\t"})
    trainer = trainers.UnigramTrainer(vocab_size=400, initial_alphabet=alphabet, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([SAMPLE, *LEARNT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")  # type: ignore[no-untyped-call]


MADE: Final = {
    **TOKENIZERS,
    "tiny": make_tiny_tokenizer,
    "other": other_tokenizer,
    "cut_by_expression": cut_by_expression,
    "unigrams": unigrams,
}
#: Target and draft.
PAIRS: Final = (
    ("tiny", "other"),
    ("tiny", "byte_fallback"),
    ("byte_fallback", "tiny"),
    ("byte_fallback", "byte_fallback_as_it_stands"),
    ("byte_fallback_as_it_stands", "byte_fallback"),
    ("byte_level", "tiny"),
    ("tiny", "cut_by_expression"),
    ("tiny", "unigrams"),
    ("unigrams", "tiny"),
)


@cache
def tokenizer(name: str) -> Any:
    return MADE[name]()


@cache
def between(target: str, draft: str) -> Translation:
    found = Translation.between(tokenizer(target), tokenizer(draft), num_target_rows=1000, num_draft_rows=1000)
    assert found is not None
    return found


def plain(name: str, text: str) -> list[int]:
    return list(tokenizer(name)(text, add_special_tokens=False)["input_ids"])


def in_steps(translation: Translation, tokens: Sequence[int], steps: Sequence[int]) -> list[int]:
    """The draft's tokens after the target's came a few at a time."""
    text, found, begin = TranslatedText(translation), list[int](), 0
    for step in (*steps, len(tokens)):
        num_gone, fresh = text.take(tokens[begin : begin + step])
        found[len(found) - num_gone :] = fresh
        begin += step
    return found


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_tokens_that_stand_for_the_same_bytes_are_one_token(target: str, draft: str) -> None:
    made = between(target, draft)
    assert list(made.draft_of) == sorted(made.draft_of)
    assert len(set(made.draft_of.values())) == len(made.draft_of) == len(made)
    ends = tokenizer(target).eos_token_id, tokenizer(draft).eos_token_id
    assert made.draft_of[ends[0]] == ends[1]
    assert made.has_end
    bytes_of = {}
    for name in (target, draft):
        made_of, control = tokenizer(name), {*tokenizer(name).all_special_ids, *tokenizer(name).added_tokens_decoder}
        bytes_of[name] = {token: token_bytes(made_of, token) for token in made_of.get_vocab().values()}
        bytes_of[name] = {token: piece for token, piece in bytes_of[name].items() if token not in control}
    ordinary = {one: other for one, other in made.draft_of.items() if one != ends[0]}
    assert all(bytes_of[target][one] == bytes_of[draft][other] for one, other in ordinary.items())
    both = {*bytes_of[target].values()} & {*bytes_of[draft].values()}
    assert {bytes_of[target][one] for one in ordinary} == both


def test_of_a_letter_and_its_byte_the_letter_is_the_token() -> None:
    made = between("tiny", "byte_fallback")
    letter = tokenizer("tiny").convert_tokens_to_ids("t")
    assert tokenizer("byte_fallback").convert_ids_to_tokens(made.draft_of[letter]) == "t"
    byte = tokenizer("tiny").convert_tokens_to_ids("Z")
    assert tokenizer("byte_fallback").convert_ids_to_tokens(made.draft_of[byte]) == "<0x5A>"


def test_rows_that_a_model_lacks_are_no_tokens() -> None:
    made = Translation.between(tokenizer("tiny"), tokenizer("other"), num_target_rows=200, num_draft_rows=150)
    assert made is not None
    assert max(made.draft_of) < 200
    assert max(made.draft_of.values()) < 150


@pytest.mark.parametrize("name", ["word_ends", "word_pieces"])
def test_tokens_whose_text_depends_on_their_neighbours_are_refused(name: str) -> None:
    for pair in (("tiny", name), (name, "tiny")):
        made = Translation.between(*map(tokenizer, pair), num_target_rows=1000, num_draft_rows=1000)
        assert made is None


def test_the_share_is_that_of_the_sample_and_the_map_names_itself() -> None:
    made = between("tiny", "other")
    tokens = plain("tiny", SAMPLE)
    assert made.share == sum(token in made.draft_of for token in tokens) / len(tokens)
    assert made.length == len(plain("other", SAMPLE)) / len(tokens)
    assert 0.5 < made.share < 1.0
    assert between("tiny", "tiny").share == 1.0
    assert len({between("tiny", draft).revision for draft in ("tiny", "other", "byte_fallback", "byte_level")}) == 4


words = st.text(LETTERS, min_size=1, max_size=12)
gaps = st.sampled_from([" ", "  ", "\n", "\n    ", "\t", ", "])
texts = st.lists(st.tuples(words, gaps), min_size=1, max_size=30).map(lambda parts: "".join(map("".join, parts)))


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@given(text=texts, steps=st.lists(st.integers(1, 7), max_size=60))
def test_a_text_that_grows_is_written_as_the_drafts_tokenizer_writes_it(
    target: str, draft: str, text: str, steps: list[int]
) -> None:
    found = in_steps(between(target, draft), plain(target, text), steps)
    assert found == plain(draft, text)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_text_without_boundaries_loses_nothing_and_stays_cheap(target: str, draft: str, rng: random.Random) -> None:
    body = "".join(rng.choice(CJK + "the") for _ in range(600))
    tokens = plain(target, body)
    made, text, found, most = between(target, draft), TranslatedText(between(target, draft)), list[int](), 0
    for token in tokens:
        num_gone, fresh = text.take([token])
        most = max(most, num_gone)
        found[len(found) - num_gone :] = fresh
    written = b"".join(token_bytes(made.draft, token) for token in found)
    # A tokenizer that puts a space before every text puts one behind a cut.
    assert written.replace(b" ", b"") == body.encode()
    assert written.count(b" ") <= 8
    assert most <= 3 * 130


def test_half_a_character_is_read_as_its_bytes() -> None:
    tokens = plain("byte_fallback", "the 界")
    assert len(tokens) > 3
    made = between("byte_fallback", "tiny")
    (num_gone, found), letters = TranslatedText(made).take(tokens[:-1]), "界".encode()
    assert num_gone == 0
    assert b"".join(token_bytes(made.draft, token) for token in found) == b"the " + letters[:2]
    assert in_steps(made, tokens, [len(tokens) - 1]) == plain("tiny", "the 界")
    # Bytes that no character has are read as the sign for what cannot be read.
    _, found = TranslatedText(made).take([tokens[-1]])
    assert b"".join(token_bytes(made.draft, token) for token in found).decode() == "\N{REPLACEMENT CHARACTER}"


def test_control_tokens_are_read_as_the_drafts_or_as_their_string_and_typed_ones_as_text() -> None:
    """`tiny` has <eos>, <user>, <answer>; `byte_level` has <s>, </s>, <|x|>."""
    target, made = tokenizer("tiny"), between("tiny", "byte_level")
    user, end = target.convert_tokens_to_ids(["<user>", "<eos>"])
    text = [user, *plain("tiny", "the theory"), end, *plain("tiny", "</s> the")]
    _, found = TranslatedText(made).take(text)
    expected = [*plain("byte_level", "<user>the theory"), tokenizer("byte_level").eos_token_id]
    assert found[: len(expected)] == expected
    typed = found[len(expected) :]
    assert tokenizer("byte_level").eos_token_id not in typed
    assert b"".join(token_bytes(made.draft, token) for token in typed) == b"</s> the"
    assert in_steps(made, text, [1, 2, 1, 3]) == found
    same = between("byte_level", "byte_fallback_as_it_stands")
    name = tokenizer("byte_level").convert_tokens_to_ids("<|x|>")
    assert same.control[name] == tokenizer("byte_fallback_as_it_stands").convert_tokens_to_ids("<|x|>")


def test_each_tokenizers_own_beginning_stands_before_the_text() -> None:
    begun = make_tiny_tokenizer()
    begun.add_special_tokens({"bos_token": AddedToken("<bos>", special=True)})
    bos = begun.convert_tokens_to_ids("<bos>")
    begun.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    plainly = tokenizer("other")
    text = begun("the theory")["input_ids"]
    assert text[0] == bos
    for target, draft, tokens in ((begun, plainly, text), (plainly, begun, plainly("the theory")["input_ids"])):
        made = Translation.between(target, draft, num_target_rows=1000, num_draft_rows=1000)
        assert made is not None
        _, found = TranslatedText(made).take(tokens)
        assert found == draft("the theory")["input_ids"]


def test_a_slot_holds_the_text_as_it_is_written_now(rng: random.Random) -> None:
    """Sequences join, grow by drafts and letter by letter, and leave; each proposal is that of a slot read anew.

    Letters that came apart are merged by the draft's tokenizer, so that its last tokens become others.
    """
    made = between("tiny", "other")
    model = Model(columns=len(made))
    model.num_rows = len(made.draft)
    known = DraftTokens(len(made.target), len(made.target), frozenset(), made.target_ids)
    state = DrafterState("small", "r", 8)
    drafter = DraftModelDrafter(state, model, known, num_slots=4, context_length=10_000, translation=made)  # type: ignore[arg-type]

    def greedy(text: list[int], num: int) -> tuple[int, ...]:
        read, found = list(in_steps(made, text, [])), list[int]()
        while len(found) < num:
            column = int(logits_behind(read, len(made)).argmax())
            found.append(int(made.target_ids[column]))
            read.append(int(made.draft_ids[column]))
        return tuple(found)

    drafted: dict[str, list[int]] = {}
    letters, num_changed = made.target.convert_tokens_to_ids([*"ĠtheĠtheory,ĠtheĠend"]), 0
    for number in range(80):
        if len(drafted) < 4 and rng.random() < 0.4:
            words = " ".join(rng.choice(["wrapping", "text,", "naïve", "encoders;", "a", "JSON"]) for _ in range(8))
            drafted[f"j{number}"] = plain("tiny", words)
            drafter.open(f"j{number}", drafted[f"j{number}"], GREEDY, "code")
        asked = [job_id for job_id in drafted if rng.random() < 0.8]
        proposals = drafter.propose([ask(drafted[job_id], 3, job_id=job_id) for job_id in asked])
        for job_id, proposal in zip(asked, proposals, strict=True):
            text = drafted[job_id]
            assert proposal.tokens == greedy(text, 3)
            before = in_steps(made, text, [])
            text += proposal.tokens[: rng.choice([0, 0, 0, 3])]
            text += letters[(begin := rng.randrange(8)) : begin + rng.randint(2, 8)]
            num_changed += in_steps(made, text, [])[: len(before)] != before
        for job_id in list(drafted):
            if rng.random() < 0.1:
                del drafted[job_id]
                drafter.close(job_id)
    assert num_changed > 10
    # Where nothing is written otherwise, a round reads what it added, and nothing twice.
    drafted = {"last": plain("tiny", "a text that is wrapped")}
    for job_id in list(drafter._held):
        drafter.close(job_id)
    drafter.open("last", drafted["last"], GREEDY, "code")
    drafter.propose([ask(drafted["last"], 1, job_id="last")])
    begin = len(model.widths)
    drafted["last"] += plain("tiny", " and then")
    drafter.propose([ask(drafted["last"], 1, job_id="last")])
    assert sum(sum(widths.values()) for widths in model.widths[begin:]) <= len(plain("other", " and then")) + 1
