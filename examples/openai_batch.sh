#!/bin/sh
# A batch file as for OpenAI's batch API: every line a request, every line of the output a response in the same form.
# sh openai_batch.sh [FOLDER]; `alphaloop` has to be on PATH.
set -eu
cd "${1:-.}"
for n in 1 2 3; do
    cat <<LINE
{"custom_id": "request-$n", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "any", "messages": [{"role": "user", "content": "Name river number $n."}], "max_tokens": 16}}
LINE
done >requests.jsonl

# --wait shows progress, and its exit code is 1 if a request ends without a text. Sending the same file again sends
# nothing twice.
alphaloop batch submit requests.jsonl --task chat --ignore-model --wait
alphaloop batch output requests.jsonl --to output.jsonl
