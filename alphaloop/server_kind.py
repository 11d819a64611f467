"""The kinds of inference servers that alphaloop knows, all with an interface in OpenAI's form."""

from __future__ import annotations

from typing import Literal

ServerKind = Literal["vllm", "sglang", "llama_cpp", "tensorrt_llm", "openai"]
"""`openai` is any other server: it is asked for nothing, and believed in nothing, that OpenAI's own form lacks."""

Granularity = Literal["rounds", "lengths", "sums", "counters", "nothing"]
"""How finely a server tells what was drafted and accepted in one request.

`rounds`: of each round, how many tokens were drafted and accepted. `lengths`: how many rounds accepted how many tokens.
`sums`: drafted and accepted tokens of the request. `counters`: the server's own counters, of a slice of requests that
ran alone. `nothing`: not even these.
"""
