"""Print a text while it is decoded: python client_stream.py TASK PROMPT"""

from __future__ import annotations

import sys

from alphaloop.client import Client, Piece

task, prompt = sys.argv[1:]

with Client() as client:
    for event in client.stream({"task": task, "prompt": prompt, "max_tokens": 64}, timeout_s=600):
        if isinstance(event, Piece):
            if event.begins_again:
                # Its worker died, and another one decodes another text. The same text simply goes on.
                print("\n-- begins again --")
            print(event.text, end="", flush=True)
        else:
            print(f"\n-- {event.status}{f': {event.error.message}' if event.error else ''} --")
