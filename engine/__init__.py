"""The engine over transformers: exact speculative decoding of many sequences at once, without Kafka and Postgres.

The only place that imports torch. `engine.own.load_engine` loads a target and its drafters; the seam that workers use
is `alphaloop.engine`. What this package offers is imported when it is first asked for, so that `--help` does not wait
four seconds for torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from alphaloop.deciding.decision import Decision as Decision
    from alphaloop.deciding.decision import Reason as Reason
    from alphaloop.engine import Generation as Generation
    from alphaloop.engine import Sampling as Sampling
    from alphaloop.messages import Job as Job
    from alphaloop.messages import Mode as Mode
    from alphaloop.settings.models import DraftModelDrafterSettings as DraftModelDrafterSettings
    from alphaloop.settings.models import LookupDrafterSettings as LookupDrafterSettings
    from alphaloop.settings.models import ModelSettings as ModelSettings
    from alphaloop.settings.models import TargetSettings as TargetSettings
    from engine.own import load_engine as load_engine

# torch's threads wait for each other hundreds of times a pass. GNU OpenMP spins 300,000 turns before it sleeps: on
# cores shared with a broker and a database that made a pass 5 to 10 times slower. Not spinning at all costs an idle
# machine 60 %. 10,000 turns cost neither. Read when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_OFFERED: Final = {
    "Decision": "alphaloop.deciding.decision",
    "DraftModelDrafterSettings": "alphaloop.settings.models",
    "Generation": "alphaloop.engine",
    "Job": "alphaloop.messages",
    "LookupDrafterSettings": "alphaloop.settings.models",
    "Mode": "alphaloop.messages",
    "ModelSettings": "alphaloop.settings.models",
    "Reason": "alphaloop.deciding.decision",
    "Sampling": "alphaloop.engine",
    "TargetSettings": "alphaloop.settings.models",
    "load_engine": "engine.own",
}


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_OFFERED[name]), name)
