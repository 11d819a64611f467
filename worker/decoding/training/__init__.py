"""Making a small draft of a target: a few of its layers, distilled on its own outputs.

`worker.commands.draft` (the command `alphaloop draft train`) runs five stages, each kept on disk and
gone on with after an interruption: write texts with the target (writing), note what the target thinks of each of their
tokens (teaching), train (distil), save (draft), judge on held-out texts (judging).
"""
