"""vLLM inside the worker, behind the same interface as a server that is reached over HTTP.

    settings → starting.start → library.RunningVllm (vLLM's AsyncLLM, its engine in child processes)
    job, sampling → client.VllmClient.complete → library → pieces.piece_of → reading.ReplyReader → Reply

Only `library` imports vLLM.
"""

from __future__ import annotations
