"""What /v1/responses and /v1/messages take beyond their own APIs: the sampling fields that chats take too."""

from typing import Any

from quire.server.protocol.base import Int, RequestBody


class ExtraFields(RequestBody):
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    truncate_prompt_tokens: Int | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def extras(self) -> dict[str, Any]:
        """Those that are set, under the names that a chat request gives them."""
        return {
            name: value for name in ExtraFields.model_fields if (value := getattr(self, name)) is not None
        }
