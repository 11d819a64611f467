"""`python -m worker.commands`: the commands that need a model, in a process of their own.

The process reads one order and answers with events; `alphaloop.commands` declares both. The command line shows them.
"""
