"""Answers that match a JSON schema, a regular expression or a list of choices."""

import json

from quire import LLM, SamplingParams, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "legs": {"type": "integer"},
        "can_fly": {"type": "boolean"},
    },
    "required": ["name", "legs", "can_fly"],
    "additionalProperties": False,
}


def main() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=64)
    with LLM() as llm:
        as_json = greedy.changed(structured=StructuredOutput.json(SCHEMA))
        text = llm.generate("A sparrow as JSON: ", as_json, use_tqdm=False)[0].outputs[0].text
        print("JSON:", json.loads(text))

        one_of_two = greedy.changed(structured=StructuredOutput.choice(["yes", "no"]))
        question = [{"role": "user", "content": "Is Paris in France?"}]
        print("choice:", llm.chat(question, one_of_two, use_tqdm=False)[0].outputs[0].text)

        date = greedy.changed(structured=StructuredOutput.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"))
        print("regex:", llm.generate("Today's date is ", date, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main()
