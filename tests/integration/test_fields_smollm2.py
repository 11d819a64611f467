"""Bad words in a tokenizer that users have: SmolLM2's."""

from __future__ import annotations

from engine.own import TransformersEngine
from engine.prompts import bad_word_tokens


def test_a_bad_word_is_barred_wherever_vllm_bars_it_and_in_its_usual_spelling_too(
    smollm2_engine: TransformersEngine,
) -> None:
    """vLLM 0.32, SamplingParams.update_from_tokenizer: behind a space only where that has as many tokens."""
    tokenizer = smollm2_engine._target.tokenizer

    def vllms(word: str) -> set[tuple[int, ...]]:
        first, other = (tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (word, f" {word}"))
        return {first, other} if other[0] != first[0] and len(other) == len(first) else {first}

    words = ("Paris", "river", "the sea", "provide", "calling", "released")
    ours = {word: set(bad_word_tokens(tokenizer, (word,))) for word in words}
    assert all(vllms(word) <= ours[word] for word in words)
    written_by_vllm = {tokenizer.decode(one) for word in words for one in ours[word] - vllms(word)}
    assert written_by_vllm == {" provide", " calling", " released"}
