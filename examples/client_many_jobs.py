"""Send a file of jobs from asyncio and count what became of them: python client_many_jobs.py JOBS.jsonl

A line is a job, such as {"task": "chat", "prompt": "…"}. The file is read as it is sent, so it need not fit into
memory. The results are written to standard output as lines of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

from alphaloop.client import AsyncClient


async def main(file: Path) -> None:
    statuses: Counter[str] = Counter()
    with file.open(encoding="utf-8") as lines:
        async with AsyncClient() as client:
            batch = await client.submit(json.loads(line) for line in lines if line.strip())
            async for result in client.results(batch, timeout_s=3600):
                statuses[result.status] += 1
                print(result.encode().decode())
    counts = ", ".join(f"{number} {status}" for status, number in sorted(statuses.items()))
    print(f"{len(batch)} jobs: {counts}", file=sys.stderr)


asyncio.run(main(Path(sys.argv[1])))
