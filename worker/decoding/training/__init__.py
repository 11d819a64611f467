"""Makes a small draft of a target: a few of the target's layers, distilled on the target's own outputs.

`worker.commands.draft` (the command `alphaloop draft train`) runs five stages. Each is kept on disk and
continues after an interruption: write texts with the target (writing), store the target's likeliest tokens at each
position of the texts (teaching), train (distil), save (draft), judge on held-out texts (judging).
"""
