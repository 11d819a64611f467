"""The topics, their messages and their headers as an AsyncAPI 3 document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alphaloop import __version__


def asyncapi() -> dict[str, Any]:
    """An AsyncAPI 3 document of the topics from alphaloop's side: it receives jobs and sends results."""
    task = {"task": {"description": "Kind of prompt: a table of configs/tasks.toml."}}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "alphaloop",
            "version": __version__,
            "description": "Jobs in, results out. At-least-once execution, exactly-once recorded outcome.",
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {
            "jobs": _channel("jobs.{task}", "job", "Jobs of one task.", task),
            "highJobs": _channel("jobs.{task}.high", "job", "Jobs of one task that go before its others.", task),
            "retries": _channel(
                "jobs.{task}.retry.{delay}",
                "retry",
                "Jobs that failed and are tried again after a delay.",
                task | {"delay": {"description": "kafka.retry_delays_s in its largest unit: 10s, 1m, 10m."}},
            ),
            "deadLetters": _channel(
                "jobs.{task}.dlq", "deadLetter", "Messages that cannot become a job, and jobs that failed.", task
            ),
            "results": _channel("results", "result", "One result for every job, keyed by job_id."),
            "tokens": _channel("tokens", "tokenChunk", "Text while it is decoded, of jobs with stream=true."),
            "control": _channel("control", "cancellation", "Requests to cancel a job that has not ended."),
            "driftReports": _channel("drift-reports", "driftReport", "What the scheduler found, one a run."),
        },
        "operations": {
            "receiveJob": _operation("receive", "jobs", "job"),
            "receiveHighJob": _operation("receive", "highJobs", "job"),
            "sendRetry": _operation("send", "retries", "retry"),
            "receiveRetry": _operation("receive", "retries", "retry"),
            "sendDeadLetter": _operation("send", "deadLetters", "deadLetter"),
            "sendResult": _operation("send", "results", "result"),
            "sendTokens": _operation("send", "tokens", "tokenChunk"),
            "receiveCancellation": _operation("receive", "control", "cancellation"),
            "sendDriftReport": _operation("send", "driftReports", "driftReport"),
        },
        "components": {
            "messages": {
                "job": _message("A text to generate", "schemas/job.json", "schemas/job_headers.json"),
                "result": _message("What became of a job", "schemas/result.json", "schemas/result_headers.json"),
                "tokenChunk": _message(
                    "OpenAI's chat.completion.chunk; headers attempt, seq and final order the chunks of a job",
                    "schemas/chunk.json",
                    "schemas/chunk_headers.json",
                ),
                "cancellation": {
                    "title": "A request to cancel a job",
                    "contentType": "application/json",
                    "payload": {
                        "type": "object",
                        "required": ["action", "job_id"],
                        "properties": {"action": {"const": "cancel"}, "job_id": {"type": "string"}},
                    },
                },
                "driftReport": {"title": "A drift report as data", "contentType": "application/json"},
                "retry": {
                    "title": "The message of a job that failed, byte for byte",
                    "contentType": "application/json",
                    "headers": _schema("schemas/retry_headers.json"),
                },
                "deadLetter": {
                    "title": "A refused message, or the message of a job that failed",
                    "contentType": "application/octet-stream",
                    "headers": _schema("schemas/dead_letter_headers.json"),
                },
            }
        },
    }


def _reference(path: str) -> dict[str, str]:
    return {"$ref": path}


def _schema(path: str) -> dict[str, Any]:
    return {"schemaFormat": "application/schema+json;version=draft-2020-12", "schema": {"$ref": path}}


def _message(title: str, path: str, headers_path: str) -> dict[str, Any]:
    return {
        "title": title,
        "contentType": "application/json",
        "headers": _schema(headers_path),
        "payload": _schema(path),
    }


def _channel(
    address: str, message: str, description: str, parameters: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    channel: dict[str, Any] = {
        "address": address,
        "description": description,
        "messages": {message: _reference(f"#/components/messages/{message}")},
    }
    return channel | ({"parameters": dict(parameters)} if parameters else {})


def _operation(action: str, channel: str, message: str) -> dict[str, Any]:
    return {
        "action": action,
        "channel": _reference(f"#/channels/{channel}"),
        "messages": [_reference(f"#/channels/{channel}/messages/{message}")],
    }
