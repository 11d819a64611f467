"""Send one job and wait for its result with a plain Kafka client: python any_kafka_client.py TASK PROMPT"""

from __future__ import annotations

import json
import os
import sys
import uuid

from confluent_kafka import Consumer, Producer, TopicPartition

task, prompt = sys.argv[1:]
servers = {"bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"]}
# Results carry it. A job that is sent again under the same job_id is decoded once.
job_id = f"example-{uuid.uuid4()}"

# Read from the present end of every partition, so that no result can come before this consumer listens.
consumer = Consumer({**servers, "group.id": job_id, "enable.auto.commit": False})
partitions = consumer.list_topics("results", timeout=30).topics["results"].partitions
ends = []
for partition in partitions:
    end = consumer.get_watermark_offsets(TopicPartition("results", partition), timeout=30)[1]
    ends.append(TopicPartition("results", partition, end))
consumer.assign(ends)

producer = Producer({**servers, "enable.idempotence": True})
job = {"job_id": job_id, "task": task, "prompt": prompt, "max_tokens": 64}
producer.produce(f"jobs.{task}", key=job_id, value=json.dumps(job))
if producer.flush(30):
    raise SystemExit("Kafka did not take the job within 30 s")

result = None
while result is None:
    message = consumer.poll(1.0)
    # A result may come twice, byte for byte the same: take the first.
    if message is not None and message.error() is None and message.key() == job_id.encode():
        result = json.loads(message.value())
consumer.close()

# succeeded, failed, expired, cancelled or refused: every message ends with a result.
print(result["status"])
print(result["text"] if result["status"] == "succeeded" else result["error"]["message"])
