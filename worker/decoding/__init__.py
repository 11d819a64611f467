"""The engine over transformers: the only place that imports torch.

`load_engine` (worker.decoding.load) builds it. Importing this package alone stays cheap, so that `--help` does not wait
four seconds for torch.
"""

from __future__ import annotations
