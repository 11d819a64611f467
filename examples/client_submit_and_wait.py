"""Send jobs and wait for their results: python client_submit_and_wait.py TASK PROMPT [PROMPT …]"""

from __future__ import annotations

import sys

from alphaloop.client import Client

task, *prompts = sys.argv[1:]

# The broker's address, and a login if it needs one, come from the environment.
with Client() as client:
    batch = client.submit([{"task": task, "prompt": prompt, "max_tokens": 64} for prompt in prompts])
    # Keep batch.to_json(), and another process can go on with Batch.from_json.
    results = {result.sent_job_id: result for result in client.results(batch, timeout_s=600)}

# Every job has one result: succeeded, failed, expired, cancelled or refused.
for job_id in batch.job_ids:
    result = results[job_id]
    print(result.status)
    if result.response is not None:  # OpenAI's chat.completion
        print(result.response["choices"][0]["message"]["content"])
    elif result.error is not None:
        print(result.error.message)
