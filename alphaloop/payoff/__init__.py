"""Whether speculation pays on a user's own prompts: the report of `alphaloop measure`, and its arithmetic. Pure.

`worker.measuring` makes a report; `alphaloop.cli.measure` shows it.
"""
