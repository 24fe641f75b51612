"""A tool call: the model writes the arguments, this script runs the function, the model gets the result."""

import json
import os
from typing import Any

import openai

URL = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000")
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def get_weather(city: str) -> str:
    return json.dumps({"city": city, "degrees": 18, "sky": "clear"})


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    # "required": a grammar makes the answer a call with arguments that match the schema.
    first = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=64
    )
    call: Any = (first.choices[0].message.tool_calls or [])[0]
    arguments = json.loads(call.function.arguments)
    print("call:", call.function.name, arguments)

    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": get_weather(**arguments)})
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="none", temperature=0, max_tokens=48
    )
    print("answer:", answer.choices[0].message.content)


if __name__ == "__main__":
    main()
