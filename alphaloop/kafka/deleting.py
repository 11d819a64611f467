"""Deleting the beginning of partitions: an operator's order, never a worker's."""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import KafkaException
from confluent_kafka import TopicPartition as TheirPartition
from confluent_kafka.admin import AdminClient

from alphaloop.kafka.config import client_config
from alphaloop.kafka.errors import broker_error, mapped
from alphaloop.kafka.records import TopicPartition
from alphaloop.settings import KafkaSettings


def delete_before(kafka: KafkaSettings, offsets: Mapping[TopicPartition, int]) -> None:
    """Delete every record below these offsets. Raises BrokerError for the first partition that refuses."""
    if not offsets:
        return
    wanted = [TheirPartition(tp.topic, tp.partition, offset) for tp, offset in offsets.items()]
    with mapped("deleting records"):
        admin = AdminClient(client_config(kafka))
        answers = admin.delete_records(wanted, request_timeout=kafka.request_timeout_s)
    for partition, answer in answers.items():
        try:
            answer.result()
        except KafkaException as error:
            raise broker_error(error, f"deleting from {partition.topic}[{partition.partition}]") from error
