"""refusal: why the engine did not take a request, as an error again."""

from quire.core.errors import InvalidRequest, QueueFull, QuireError
from quire.link.messages import Refused


def refusal(message: Refused) -> QuireError:
    if message.kind == "invalid":
        return InvalidRequest(message.message, message.param)
    if message.kind == "leaving":
        return QueueFull(message.message)
    return QuireError(message.message)
