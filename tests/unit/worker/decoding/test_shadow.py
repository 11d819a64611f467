"""Scoring look-up on texts that others decode: what it may look at, what it may take, and which texts count."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.settings.models import LookupDrafterSettings
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.scoring import ADVANCE_S, Shadows
from worker.engine import ShadowCounts


@dataclass(eq=False)
class KnownText:
    """What is asked of a sequence here, with a text that is known beforehand."""

    job_id: str
    text: list[int]
    num_prompt: int = 1
    task: str = "code"
    drafter: str | None = None
    shortest_draft: int = 0
    is_first_drafted: bool = False
    finish_reason: Literal["stop", "length"] | None = None
    device_s: float = 1.0
    max_tokens: int = 10_000

    def has_drafted_throughout(self, drafter: str, num_draft_tokens: int) -> bool:
        return self.drafter == drafter and self.shortest_draft >= num_draft_tokens


Text: Any = KnownText


def lookup(name: str = "lookup", **settings: object) -> LookupDrafter:
    return LookupDrafter(name, LookupDrafterSettings.model_validate({"min_probability": 0, **settings}))


def decode(shadows: Shadows, text: Any, *, num_steps: int = 0) -> tuple[ShadowCounts, ...]:
    """A whole sequence, read along for so many steps before it ends."""
    shadows.begin(text)
    for _ in range(num_steps):
        shadows.advance()
    text.finish_reason = "stop"
    return shadows.end(text)


def counts(found: tuple[ShadowCounts, ...]) -> AcceptanceCounts:
    (one,) = found
    assert (one.drafter, one.num_draft_tokens) == ("lookup", 12)
    return one.counts


class Clock:
    """Goes on by `tick_s` whenever it is looked at."""

    def __init__(self, tick_s: float) -> None:
        self.now, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


def test_of_earlier_results_only_those_count_that_were_there_when_the_job_began() -> None:
    result = list(range(100, 120))
    drafter = lookup(remember_tasks=("code",))
    shadows = Shadows({"lookup": drafter}, clock=lambda: 0.0)
    begun_before = Text("b", [0, *result])
    shadows.begin(begun_before)
    first = counts(decode(shadows, Text("a", [0, *result])))
    assert first.num_accepted == 0, "nothing repeats, and it does not find itself"
    drafter.remember("code", result)
    begun_before.finish_reason = "stop"
    assert counts(shadows.end(begun_before)).num_accepted == 0, "the first ended while it ran"
    assert counts(decode(shadows, Text("c", [0, *result]))).num_accepted > 15
    assert counts(decode(shadows, Text("d", [0, *result], task="sql"))).num_accepted == 0


def test_results_that_were_dropped_since_spoil_no_mark() -> None:
    drafter = lookup(remember_tasks=("code",), max_remembered_bytes=1 << 16)
    shadows = Shadows({"lookup": drafter}, clock=lambda: 0.0)
    for number in range(20):
        result = [1000 * number + n for n in range(40)]
        before = Text(f"{number}", [0, *result])
        shadows.begin(before)
        drafter.remember("code", result)
        before.finish_reason = "stop"
        assert counts(shadows.end(before)).num_accepted == 0
        assert counts(decode(shadows, Text(f"{number} again", [0, *result]))).num_accepted > 30


def test_what_decoded_a_text_throughout_and_what_is_no_traffic_is_not_scored() -> None:
    shadows = Shadows({"lookup": lookup(remember_tasks=("code",)), "other": lookup("other")}, clock=lambda: 0.0)
    for shortest, scored in ((12, ["lookup"]), (11, ["lookup", "other"]), (0, ["lookup", "other"])):
        text = Text("a", [1, 1, 1], drafter="other", shortest_draft=shortest)
        assert [found.drafter for found in decode(shadows, text)] == scored
    assert decode(shadows, Text("b", [1, 1, 1], task="")) == ()


def test_a_lookup_that_is_paused_in_the_middle_is_scored_on_the_whole_text(rng: random.Random) -> None:
    text = [rng.randrange(3) for _ in range(60)]
    shadows = Shadows({"lookup": lookup()}, clock=lambda: 0.0)
    whole = counts(decode(shadows, Text("a", text)))
    paused = Text("b", text[:30], drafter="lookup", shortest_draft=12)
    shadows.begin(paused)
    shadows.advance()
    paused.shortest_draft = 0
    for token in text[30:]:
        paused.text.append(token)
        shadows.advance()
    paused.finish_reason = "stop"
    assert counts(shadows.end(paused)) == whole
    assert whole.num_tokens == 59


def test_readings_take_turns_within_their_time_and_leave_little_to_the_end() -> None:
    """A round takes a quarter of what a step may take, and each text grows by a token a step."""
    clock = Clock(ADVANCE_S / 4)
    drafter = lookup(shadow_share=1)
    shadows = Shadows({"lookup": drafter}, clock=clock)
    texts = [Text(f"{number}", [0], device_s=1e9) for number in range(3)]
    for text in texts:
        shadows.begin(text)
    for token in range(200):
        for number, text in enumerate(texts):
            text.text.append(1000 * number + token)
        before = clock.now
        shadows.advance()
        assert clock.now - before <= ADVANCE_S + 2 * clock.tick_s
    read = [reading.rounds.counts.num_tokens for reading in shadows._readings]
    assert len(read) == 3
    assert min(read) >= 200 - 12 - 3, "what a round could accept, and some steps"
    for text in texts:
        text.finish_reason = "stop"
        assert counts(shadows.end(text)).num_tokens == 200


def test_a_cancelled_sequence_is_forgotten() -> None:
    shadows = Shadows({"lookup": lookup()}, clock=lambda: 0.0)
    texts = [Text(name, [0, 1, 1]) for name in ("a", "b")]
    for text in texts:
        shadows.begin(text)
    shadows.cancel(texts[0])
    texts[1].finish_reason = "stop"
    assert shadows.end(texts[0]) == ()
    assert len(shadows.end(texts[1])) == 1
    shadows.begin(texts[0])
    shadows.clear()
    assert shadows.end(texts[0]) == ()


def test_scoring_takes_its_share_of_the_time_and_chooses_by_nothing_in_the_text(rng: random.Random) -> None:
    """A score takes 10 ms and a job 1 s, so at a share of 0.2 % one text in five is scored, long or short."""
    shadows = Shadows({"lookup": lookup(shadow_share=0.002)}, clock=Clock(0.01))
    scored: dict[int, int] = {2: 0, 40: 0}
    name = rng.randrange(2**40)
    for number in range(3000):
        length = 2 if number % 2 else 40
        scored[length] += len(decode(shadows, Text(f"{name}-{number}", [0] * (length + 1))))
    # 600 of 3000 are expected, 300 of each length; six standard deviations of a binomial draw.
    assert abs(sum(scored.values()) - 600) < 6 * (3000 * 0.2 * 0.8) ** 0.5
    assert abs(scored[2] - scored[40]) < 6 * (3000 * 0.2 * 0.8) ** 0.5


def test_a_share_of_nothing_scores_nothing() -> None:
    assert decode(Shadows({"lookup": lookup(shadow_share=0)}), Text("a", [0, 1, 2]), num_steps=2) == ()
