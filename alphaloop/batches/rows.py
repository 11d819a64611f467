"""Rows of OpenAI's output and error files. Pure."""

from __future__ import annotations

from typing import Any

from alphaloop.errors import MessageError
from alphaloop.messages import Result, Status

_CLIENT_ERROR, _SERVER_ERROR = 400, 500


def output_row(result: Result, *, custom_id: str | None, model: str, is_chat: bool) -> dict[str, Any]:
    """A request that succeeded: the response as the endpoint would have given it.

    `model` is named where the result does not name one, because a worker of an earlier release wrote it.
    """
    body: dict[str, Any] = {
        "id": result.job_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(result.recorded_at.timestamp()),
        "model": result.target or model,
        "choices": [_choice(result, is_chat=is_chat)],
        "usage": result.usage.model_dump() if result.usage else None,
    }
    response = {"status_code": 200, "request_id": result.job_id, "body": body}
    return {"id": _request(result.job_id), "custom_id": custom_id, "response": response, "error": None}


def failed_row(result: Result, *, custom_id: str | None) -> dict[str, Any]:
    """A request that failed, expired or was cancelled."""
    code = result.error.code if result.error else result.status.value
    message = result.error.message if result.error else result.status.value
    if result.status is Status.FAILED:
        return _refused(result.job_id, custom_id, _SERVER_ERROR, "server_error", code, message, None)
    error = {"code": f"batch_{result.status.value}", "message": message}
    return {"id": _request(result.job_id), "custom_id": custom_id, "response": None, "error": error}


def refused_row(job_id: str, code: str, message: str, field: str | None, *, custom_id: str | None) -> dict[str, Any]:
    """A request that a worker refused."""
    return _refused(job_id, custom_id, _CLIENT_ERROR, "invalid_request_error", code, message, field)


def bad_line_row(number: int, error: MessageError, *, custom_id: str | None) -> dict[str, Any]:
    """A line that was not sent; `line` is its number in the file, because it may have no custom_id."""
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    row = refused_row(f"line-{number}", error.code, message, error.field, custom_id=custom_id)
    return {**row, "line": number}


def _refused(
    job_id: str, custom_id: str | None, status: int, kind: str, code: str, message: str, field: str | None
) -> dict[str, Any]:
    error = {"message": message, "type": kind, "param": field, "code": code}
    response = {"status_code": status, "request_id": job_id, "body": {"error": error}}
    return {
        "id": _request(job_id),
        "custom_id": custom_id,
        "response": response,
        "error": {"code": code, "message": message},
    }


def _choice(result: Result, *, is_chat: bool) -> dict[str, Any]:
    end = {"index": 0, "logprobs": None, "finish_reason": result.finish_reason}
    if is_chat:
        return {**end, "message": {"role": "assistant", "content": result.text, "refusal": None}}
    return {**end, "text": result.text}


def _request(job_id: str) -> str:
    return f"batch_req_{job_id}"
