"""From Kafka to a job that can be decoded: polling, offsets, validation, refusals."""
