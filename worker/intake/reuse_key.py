"""Which jobs are equal: the digest of all that decides a greedy text.

Equal are jobs of one task and segment that the same target, revision and engine would answer alike: the same prompt
under the same settings, in the same form. What changes no greedy text does not count: the seed, what the job expects
(`prediction`), whether it is streamed, how it may be decoded.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Final

from pydantic_core import to_json

from alphaloop.engine import PreparedJob, Sampling
from alphaloop.messages import Body, Purpose
from alphaloop.server_identity import EngineIdentity
from alphaloop.settings import TaskSettings

#: Changes where the same fields come to mean another text.
_VERSION: Final = "1"
_CHANGES_NO_TEXT: Final = frozenset({"seed", "prediction", "stream", "predicted", "form_bucket", "bucket"})
#: Settings with every default filled in. A constraint follows from the body.
_OF_SAMPLING: Final = tuple(
    setting.name for setting in fields(Sampling) if setting.name not in _CHANGES_NO_TEXT | {"constraint"}
)
#: What the body says beside these: the prompt, tools, the form of the answer. The model is the target or its adapter.
_NOT_OF_BODY: Final = set(Body.model_fields) & (_CHANGES_NO_TEXT | {"model", *_OF_SAMPLING})
#: Content that lies elsewhere may be another one tomorrow.
_INLINE_IMAGE: Final = "data:"


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """Under which key a job's text is reused, and how old the text may be that answers it."""

    key: bytes
    max_age: timedelta


def reuse_rule(prepared: PreparedJob, settings: TaskSettings, identity: EngineIdentity) -> ReuseRule | None:
    """The rule of a job; None where neither job nor task asks for it, and where its text is not decided by a key.

    `identity`: what decodes here.
    """
    job, sampling = prepared.job, prepared.sampling
    is_wanted = settings.reuse if job.reuse is None else job.reuse
    if not is_wanted or job.purpose is not Purpose.TRAFFIC or sampling.temperature > 0 or _refers_to_images(job.body):
        return None
    identity = identity.of(job.body.model)
    if not identity.target_revision:
        return None
    digest = hashlib.sha256()
    for part in (
        to_json([_VERSION, job.task, job.segment or "", identity.target, identity.target_revision, identity.engine]),
        to_json({name: getattr(sampling, name) for name in _OF_SAMPLING}),
        job.body.model_dump_json(exclude=_NOT_OF_BODY, exclude_none=True, exclude_defaults=True).encode(),
        # A chat template may write the date into a prompt.
        array("q", prepared.token_ids).tobytes(),
    ):
        digest.update(len(part).to_bytes(8, "big") + part)
    return ReuseRule(digest.digest(), timedelta(days=settings.reuse_days))


def _refers_to_images(body: Body) -> bool:
    """Whether the prompt has an image that is not part of the message."""
    if not body.num_images:
        return False
    parts = (part for said in body.messages or () if isinstance(said.content, tuple) for part in said.content)
    images = (part["image_url"]["url"] for part in parts if part["type"] == "image_url")
    return not all(url.startswith(_INLINE_IMAGE) for url in images)
