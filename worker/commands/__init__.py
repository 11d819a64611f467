"""`python -m worker.commands`: what the command line cannot do itself, because it needs a model.

The process reads one order and answers with events; `alphaloop.commands` declares both. Nothing in here shows anything.
"""
