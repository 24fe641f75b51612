"""The response object before its first token, and its bill."""

import time
from typing import Any

from quire.core.sampling import SamplingParams
from quire.server.protocol.base import Usage
from quire.server.protocol.responses import ResponseObject, ResponseRequest, ResponseUsage


def new_response(
    body: ResponseRequest, response_id: str, model: str, store: bool, recommended: SamplingParams
) -> ResponseObject:
    """What is known before the first token; the rest of its fields say what was asked for."""
    text = body.text
    reasoning = body.reasoning
    verbosity = {"verbosity": text.verbosity} if text is not None and text.verbosity else {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "store": store,
        "temperature": recommended.temperature if body.temperature is None else body.temperature,
        "text": {"format": (text.format if text is not None else None) or {"type": "text"}, **verbosity},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": recommended.top_p if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def response_usage(usage: Usage) -> ResponseUsage:
    cached: Any = usage.get("prompt_tokens_details") or {}
    generated: Any = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": generated.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
    }
