"""Kernels for a CPU, compiled by numba when a model is loaded: what torch would do in many small calls.

Each is a C function over addresses that runs on torch's own threads. They exist because a pass of a small model on a
CPU spends more time between its matrix products than in them (docs/decisions/0007-own-kernels.md).

From the bottom up: `compiling` makes machine code and keeps it on disk, `threads` runs it, `numbers` reads and writes
dtypes, `multiplying` emits matrix products; `linear`, `attention` (with `attending`) and `pointwise` are the kernels,
`program` runs a pass of them in one call. `network.compiled` is the only caller.
"""
