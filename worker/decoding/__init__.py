"""The engine over transformers: the only place that imports torch.

`load_engine` (worker.decoding.load) builds it. Importing this package alone stays cheap, so that `--help` does not wait
four seconds for torch.
"""

from __future__ import annotations

import os

# torch's threads wait for each other hundreds of times a pass. By default they spin, which on cores shared with a
# broker and a database made a pass 5 to 10 times slower. OpenMP reads this when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
