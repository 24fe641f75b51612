"""instructor: pydantic classes by tools and by JSON schemas. It has no chats and embeddings of its own."""

from typing import Any

import anthropic
import openai
import pytest

instructor = pytest.importorskip("instructor", reason="runs with make test-clients")
from instructor.core.exceptions import InstructorRetryException

from tests.clients import asked

pytestmark = pytest.mark.clients
MESSAGES = [{"role": "user", "content": asked.QUESTION}]


def build_client(url: str, mode: str) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    return instructor.from_openai(client, mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_an_answer_is_parsed_into_a_model(url: str, mode: str):
    limit = {"max_output_tokens" if mode.startswith("RESPONSES") else "max_tokens": 80}
    sent: Any = {"model": asked.MODEL, "messages": MESSAGES, **limit}
    found = build_client(url, mode).create(response_model=asked.City, max_retries=0, **sent)
    assert isinstance(found, asked.City)


def test_an_anthropic_answer_is_parsed_into_a_model(url: str):
    client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    found = instructor.from_anthropic(client).create(
        model=asked.MODEL, messages=MESSAGES, max_tokens=80, response_model=asked.City, max_retries=0
    )
    assert isinstance(found, asked.City)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_parts_of_a_model_are_streamed(url: str, mode: str):
    client = build_client(url, mode)
    options: Any = {"model": asked.MODEL, "messages": MESSAGES, "max_tokens": 80, "temperature": 0}
    parts = list(client.create_partial(response_model=asked.City, **options))
    assert len(parts) > 1
    asked.City.model_validate(parts[-1].model_dump())


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"messages": [{"role": "user", "content": asked.TOO_LONG}]}, openai.BadRequestError),
        ({"model": asked.UNKNOWN}, openai.NotFoundError),
    ],
    ids=["too long", "unknown"],
)
def test_errors_have_the_clients_own_classes(url: str, changed: dict[str, Any], kind: type[Exception]):
    sent: Any = {"model": asked.MODEL, "messages": MESSAGES, "max_tokens": 80, **changed}
    with pytest.raises(InstructorRetryException) as caught:
        build_client(url, "TOOLS").create(response_model=asked.City, max_retries=0, **sent)
    assert isinstance(caught.value.__cause__, kind)
