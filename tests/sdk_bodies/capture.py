"""Lets openai, litellm, LangChain and instructor build requests, and writes their bodies, a line each.

    python -m venv sdk && sdk/bin/pip install openai litellm langchain-openai instructor
    sdk/bin/python tests/sdk_bodies/capture.py > tests/sdk_bodies/bodies.jsonl

Nothing leaves the machine: a server on it takes the requests and answers each with the same text. litellm may ask for
an older openai than the newest; then run the file a second time with `openai` as its argument, in an environment that
has the newest one alone, and put these lines in place of its own.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none", "LANGSMITH_TRACING": "false"}
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the weather in Paris?"}]
PIXEL = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
SEEN = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}},
        ],
    }
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
CALLED = [
    *SAID,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "21 C, sunny"},
]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Place(BaseModel):
    """A place."""

    city: str
    country: str | None = None
    kind: Literal["town", "village"] = "town"


class Trip(BaseModel):
    """A trip through places."""

    title: str = Field(description="In a few words.")
    stops: list[Place]


class Taker(BaseHTTPRequestHandler):
    """Takes a request and gives every client an answer that it can read."""

    taken: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.taken.append((self.path, body))
        answer = {
            "id": "a",
            "object": "chat.completion",
            "created": 1,
            "model": "target",
            "choices": [
                {
                    "index": 0,
                    "text": "ok",
                    "message": {"role": "assistant", "content": '{"city": "Paris", "title": "x", "stops": []}'},
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        value = b"data: [DONE]\n\n" if body.get("stream") else json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if body.get("stream") else "application/json")
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, *args: object) -> None:
        """Nothing is logged."""


Case = tuple[str, Callable[[], object]]


def of_openai(url: str) -> Iterator[Case]:
    """OpenAI's own client."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    chat, prompts = client.chat.completions, client.completions

    def asks(name: str, **fields: Any) -> Case:
        return name, lambda: chat.create(**{"model": "target", "messages": SAID, **fields})

    yield asks("a conversation")
    yield asks(
        "settings", temperature=0.7, top_p=0.9, seed=3, stop=["END"], max_completion_tokens=64, presence_penalty=1
    )
    yield asks("a stream", stream=True, stream_options={"include_usage": True})
    yield asks("tools", tools=[WEATHER])
    yield asks("a forced call", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    yield asks("a named call", tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "get_weather"}})
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    yield asks("allowed tools", tools=[WEATHER], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    yield asks("what a tool gave", messages=CALLED, tools=[WEATHER])
    yield asks("a JSON object", response_format={"type": "json_object"})
    form = {"name": "place", "schema": SCHEMA, "strict": True}
    yield asks("a schema", response_format={"type": "json_schema", "json_schema": form})
    yield asks("text as the format", response_format={"type": "text"})
    yield "a parsed model", lambda: chat.parse(model="target", messages=SAID, response_format=Trip)
    yield (
        "a parsed tool",
        lambda: chat.parse(model="target", messages=SAID, tools=[openai.pydantic_function_tool(Place)]),
    )
    yield asks("log-probabilities", logprobs=True, top_logprobs=5)
    yield asks("three texts", n=3, temperature=1.0)
    yield asks("effort", reasoning_effort="low")
    yield asks("an image", messages=SEEN)
    yield asks(
        "an image inside", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]
    )
    yield asks("a bias", logit_bias={"50256": -100})
    yield asks("an account's fields", user="u", metadata={"a": "b"}, store=False, service_tier="auto")
    custom = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
    yield asks("a custom tool", tools=[custom])
    audio = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    yield asks("sound", messages=[{"role": "user", "content": [audio]}])
    yield asks("a prediction", prediction={"type": "content", "content": "def f():"})
    yield asks("a search on the web", web_search_options={})
    yield asks("functions", functions=[WEATHER["function"]], function_call="auto")
    yield asks("vLLM's choice", extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    yield asks("vLLM's older schema", extra_body={"guided_json": SCHEMA})
    yield asks("vLLM's settings", extra_body={"top_k": 20, "min_p": 0.05, "min_tokens": 4, "ignore_eos": True})
    yield asks("no thinking", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    begun = [*SAID, {"role": "assistant", "content": "In Paris it is"}]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    yield asks("a text that goes on", messages=begun, extra_body=going_on)
    yield "a prompt", lambda: prompts.create(model="target", prompt="def f():", max_tokens=8)
    yield "a prompt's log-probabilities", lambda: prompts.create(model="target", prompt="def f():", logprobs=3)
    yield "a prompt in several", lambda: prompts.create(model="target", prompt=["a", "b"])
    yield "an echo", lambda: prompts.create(model="target", prompt="def f():", echo=True, suffix="return 1")


def of_litellm(url: str) -> Iterator[Case]:
    """litellm, which translates between providers."""
    import litellm

    litellm.suppress_debug_info = True
    litellm.drop_params = False

    def asks(name: str, model: str = "hosted_vllm/target", **fields: Any) -> Case:
        given = {"model": model, "messages": SAID, "api_base": url, "api_key": "none", "max_retries": 0, **fields}
        return name, lambda: litellm.completion(**given)

    yield asks("a conversation")
    yield asks("as OpenAI's", model="openai/target", max_tokens=16, temperature=0.2)
    yield asks("tools", tools=[WEATHER], tool_choice="auto", parallel_tool_calls=True)
    yield asks("a forced call", tools=[WEATHER], tool_choice="required")
    yield asks("what a tool gave", messages=CALLED, tools=[WEATHER])
    yield asks("a model as the format", response_format=Trip)
    yield asks("a JSON object", response_format={"type": "json_object"})
    yield asks("effort", reasoning_effort="high")
    yield asks("an image", messages=SEEN)
    yield asks("three texts", n=3, temperature=0.8, seed=1)
    yield asks("log-probabilities", logprobs=True, top_logprobs=2)
    yield asks("vLLM's fields", extra_body={"guided_regex": "[0-9]+", "repetition_penalty": 1.1})
    thought = {"role": "assistant", "content": "21 C.", "reasoning_content": "It is summer."}
    yield asks("what was thought", messages=[*SAID, thought, {"role": "user", "content": "And tomorrow?"}])
    cached = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    yield asks("a cached part", messages=[{"role": "system", "content": cached}, SAID[1]])
    yield (
        "a prompt",
        lambda: litellm.text_completion(
            model="text-completion-openai/target", prompt="def f():", max_tokens=8, api_base=url, api_key="none"
        ),
    )


def of_langchain(url: str) -> Iterator[Case]:
    """LangChain's models in OpenAI's form."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI

    @tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return city

    def model(**fields: Any) -> Any:
        return ChatOpenAI(model="target", base_url=url, api_key="none", max_retries=0, **fields)

    said = [SystemMessage("Be brief."), HumanMessage("What is the weather in Paris?", name="ann")]
    yield "a conversation", lambda: model(temperature=0).invoke(said)
    yield "tools", lambda: model().bind_tools([get_weather]).invoke(said)
    yield "any tool", lambda: model().bind_tools([get_weather], tool_choice="any").invoke(said)
    yield "a named tool", lambda: model().bind_tools([get_weather], tool_choice="get_weather").invoke(said)
    yield (
        "a strict tool",
        lambda: model().bind_tools([get_weather], strict=True, parallel_tool_calls=False).invoke(said),
    )
    call = AIMessage("", tool_calls=[{"name": "get_weather", "args": {"city": "Paris"}, "id": "call_1"}])
    given = ToolMessage("21 C", tool_call_id="call_1")
    yield "what a tool gave", lambda: model().bind_tools([get_weather]).invoke([*said, call, given])
    for method in ("json_schema", "function_calling", "json_mode"):
        yield (
            f"a model by {method}",
            lambda method=method: model().with_structured_output(Trip, method=method).invoke(said),
        )
    yield (
        "tools and a format",
        lambda: model().bind_tools([get_weather], response_format=Trip, strict=True).invoke(said),
    )
    yield "three texts", lambda: model(n=3, temperature=1).generate([said])
    yield "log-probabilities", lambda: model(logprobs=True, top_logprobs=2).invoke(said)
    yield "an image", lambda: model().invoke([HumanMessage(SEEN[0]["content"])])
    block = {"type": "image", "base64": PIXEL.partition(",")[2], "mime_type": "image/png"}
    yield "an image as a block", lambda: model().invoke([HumanMessage([block])])
    yield "effort", lambda: model(reasoning_effort="medium").invoke(said)
    yield "vLLM's fields", lambda: model(extra_body={"top_k": 5, "guided_choice": ["yes", "no"]}).invoke(said)
    yield "a stream", lambda: list(model(stream_usage=True).stream(said))
    prompts = OpenAI(model="target", base_url=url, api_key="none", max_retries=0, temperature=0)
    yield "a prompt", lambda: prompts.invoke("def f():")


def of_instructor(url: str) -> Iterator[Case]:
    """instructor, whose modes ask for one model in several ways."""
    import instructor
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON"):
        asking = instructor.from_openai(client, mode=instructor.Mode[mode])
        yield (
            mode,
            lambda asking=asking: asking.chat.completions.create(
                model="target", messages=SAID, response_model=Trip, max_retries=0
            ),
        )


LIBRARIES: dict[str, tuple[str, Callable[[str], Iterator[Case]]]] = {
    "openai": ("openai", of_openai),
    "litellm": ("litellm", of_litellm),
    "langchain": ("langchain-openai", of_langchain),
    "instructor": ("instructor", of_instructor),
}


def main(names: list[str]) -> None:
    """Write the first request of every case; a case that sent none is told on standard error."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Taker)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in names or LIBRARIES:
        package, cases = LIBRARIES[name]
        for case, ask in cases(f"http://127.0.0.1:{server.server_port}/v1"):
            Taker.taken.clear()
            with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(Exception):
                ask()
            if not Taker.taken:
                print(f"{name}: {case} sent nothing", file=sys.stderr)
                continue
            path, body = Taker.taken[0]
            line = {"case": f"{name}: {case}", "library": f"{package} {version(package)}", "path": path, "body": body}
            print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
