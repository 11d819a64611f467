"""Makes a small draft of a target: a few of the target's layers, distilled on the target's own outputs.

`run.TrainingRun` (the command `alphaloop draft train`) goes through five stages. Each is kept on disk and continues
after an interruption: write texts with the target (data), store the target's likeliest tokens at each position of the
texts (data), train (distil), save (distil), judge on held-out texts (distil). `recipe` has every setting.
"""
