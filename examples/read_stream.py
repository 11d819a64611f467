"""Print a text while it is decoded: python read_stream.py TASK PROMPT"""

from __future__ import annotations

import json
import os
import sys
import uuid

from confluent_kafka import Consumer, Producer, TopicPartition

task, prompt = sys.argv[1:]
servers = {"bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"]}
job_id = f"example-{uuid.uuid4()}"

consumer = Consumer({**servers, "group.id": job_id, "enable.auto.commit": False})
ends = []
for topic in ("tokens", "results"):
    for partition in consumer.list_topics(topic, timeout=30).topics[topic].partitions:
        end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=30)[1]
        ends.append(TopicPartition(topic, partition, end))
consumer.assign(ends)

producer = Producer({**servers, "enable.idempotence": True})
job = {"job_id": job_id, "task": task, "prompt": prompt, "max_tokens": 64, "stream": True}
producer.produce(f"jobs.{task}", key=job_id, value=json.dumps(job))
if producer.flush(30):
    raise SystemExit("Kafka did not take the job within 30 s")

attempt, is_open = 0, True
while is_open:
    message = consumer.poll(1.0)
    if message is None or message.error() is not None or message.key() != job_id.encode():
        continue
    if message.topic() == "results":
        # A message that is no job has no stream: only its result says so.
        result = json.loads(message.value())
        if result["status"] == "refused":
            is_open = False
            print(f"-- refused: {result['error']['message']} --")
        continue
    headers = {name: content.decode() for name, content in message.headers()}
    if int(headers["attempt"]) > attempt:
        # After a crash of its worker a job is decoded again, and its text begins anew.
        if attempt:
            print("\n-- begins anew --")
        attempt = int(headers["attempt"])
    if int(headers["attempt"]) < attempt:
        continue
    if headers["final"] == "1":
        is_open = False
        print(f"\n-- {headers['status']} --")
    else:
        print(json.loads(message.value())["choices"][0]["delta"].get("content") or "", end="", flush=True)
consumer.close()
