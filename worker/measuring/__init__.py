"""`alphaloop measure`: whether speculation pays on somebody's own prompts, with the reasons where it does not.

`worker.commands.measure` drives it, and the report is `alphaloop.payoff`. Nothing in here but `records` knows what
decodes: everything goes through `worker.engine.Engine`.
"""
