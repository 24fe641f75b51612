"""Errors in the shape of the API that a path speaks: OpenAI's, or Anthropic's."""

from starlette.types import Scope

from quire.server.caller import Caller, path_of
from quire.server.errors import ApiError
from quire.server.messages.errors import REQUEST_ID, anthropic_body, speaks_anthropic
from quire.server.reply import JsonReply, error_reply


def error_reply_for(scope: Scope, error: ApiError) -> JsonReply:
    caller: Caller = scope["quire.caller"]
    caller.note_error(error)
    if not speaks_anthropic(path_of(scope)):
        return error_reply(error)
    body = anthropic_body(error, caller.request_id)
    headers = {**error.headers, REQUEST_ID: caller.request_id}
    return JsonReply(body, status_code=error.status, headers=headers)
