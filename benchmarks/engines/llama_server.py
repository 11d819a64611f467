"""llama.cpp's server, run by the Python that has the wheel xllamacpp: GGUF HOST PORT SLOTS NAME K [TEMPLATE].

K 0: no drafts. It ends on SIGTERM. Nothing of alphaloop is imported, because that Python does not have it.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

_CONTEXT = 2048  # tokens a slot
_MATCH = 3  # tokens of a match that is looked up


def serve(gguf: str, host: str, port: str, slots: str, name: str, k: str, template: str = "") -> None:
    """Listen until a signal comes."""
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = gguf
    params.hostnames, params.port = [host], int(port)
    params.n_parallel, params.n_ctx = int(slots), _CONTEXT * int(slots)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.model_alias = {name}
    params.endpoint_metrics = params.endpoint_props = True
    if int(k):
        params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = _MATCH, int(k)
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    if template:  # with tools and thoughts, which the model's own has not
        params.use_jinja, params.chat_template = True, Path(template).read_text()
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    serve(*sys.argv[1:])
