"""What passes between the command line and `python -m worker.commands`, which carries out what needs a model.

The command line writes one order as a line of JSON to that process's standard input. The process answers with one
event a line on its standard output. Only the command line shows anything.
"""
