"""Call a tool through OpenAI's API, with nothing but the standard library. Start the server first: specserve serve."""

import json
import os
from typing import Any
from urllib.request import Request, urlopen

URL = os.environ.get("SPECSERVE_BASE_URL", "http://127.0.0.1:8000") + "/v1/chat/completions"
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


def chat(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 96, **fields}
    request = Request(URL, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return message


messages: list[dict[str, Any]] = [{"role": "user", "content": "Will it rain in Oslo in the next 3 days?"}]
answer = chat(messages, tools=[{"type": "function", "function": TOOL}], tool_choice="required")
for call in answer["tool_calls"]:
    arguments = json.loads(call["function"]["arguments"])  # fits the schema: a grammar let nothing else through
    print(f"{call['function']['name']}({arguments})")
    result = {"city": arguments["city"], "forecast": "dry"}
    messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)}]
    break
print(chat(messages)["content"])
