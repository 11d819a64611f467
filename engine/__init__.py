"""The engine over transformers: the only place that imports torch.

`engine.own.load_engine` builds it. Importing this package alone stays cheap, so that `--help` does not
wait four seconds for torch.
"""

from __future__ import annotations

import os

# torch's threads wait for each other hundreds of times a pass. GNU OpenMP spins 300,000 turns before it sleeps: on
# cores shared with a broker and a database that made a pass 5 to 10 times slower. Not spinning at all costs an idle
# machine 60 %. 10,000 turns cost neither. Read when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
