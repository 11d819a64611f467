"""`alphaloop measure`: whether speculation pays on somebody's own prompts, with the reasons where it does not.

`worker.measure_main` is the process. Nothing in here knows what decodes: everything goes
through `worker.engine.Engine`.
"""
