"""Jobs whose messages went with a topic that was made anew, before a worker had read them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tests.chaos.collecting import ended_by, letters_of
from tests.chaos.reading import TopicReader

if TYPE_CHECKING:
    from tests.chaos.world import World


def send_lost_again(world: World, reader: TopicReader) -> int:
    """Send those jobs again that have neither outcome nor dead letter, as a client would; returns how many.

    Only what was sent before the topics were made anew may be missing: later messages have to be read of the new ones.
    """
    ended = ended_by(world.database_url, datetime.now(UTC)) | {letter.job_id for letter in letters_of(reader)}
    again = [job for job in world.feeder.sent[: world.num_sent_before_anew] if job.job_id not in ended]
    world.feeder.send_again(again)
    return len(again)
