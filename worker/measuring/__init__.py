"""`alphaloop measure`: whether speculation pays on a user's own prompts, with the reasons where it does not.

`worker.commands` drives it, and the report is `alphaloop.payoff`. Only `records` depends on the library that
decodes; everything else uses `alphaloop.engine.Engine`.
"""
