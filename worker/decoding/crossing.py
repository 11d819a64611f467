"""The only place where a round's tensors go from a drafter's device to the target's.

What goes between the two otherwise is numbers of the host: a drafter is given the text as token ids and answers with
token ids. Only the distributions of drawn tokens are tensors, which verification compares with the target's own. They
cross here, once a round for each drafter, because every copy between devices costs a start of its own and, where the
two have no direct way, a stay in main memory. Greedy jobs and jobs with a seed send no distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from worker.decoding.proposal import Proposal


def arrived(proposals: Sequence[Proposal], device: torch.device) -> list[Proposal]:
    """The proposals of one drafter with their distributions on `device`, the target's.

    Those that are there already stay as they are. Others have arrived when this returns: the wait belongs to the time
    of proposing, because another placement of the draft would not have it.
    """
    far = [index for index, one in enumerate(proposals) if one.q is not None and one.q.device != device]
    found = list(proposals)
    if not far:
        return found
    leaving = [q for index in far if (q := proposals[index].q) is not None]
    # One copy: token by token and job by job there would be dozens.
    crossed = torch.cat(leaving).to(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for index, q in zip(far, torch.split(crossed, [len(q) for q in leaving]), strict=True):
        found[index] = replace(proposals[index], q=q)
    return found
