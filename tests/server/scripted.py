"""An application whose engine says what a test has written down: streams without a process and without a model."""

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from starlette.types import ASGIApp
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from quire import __version__
from quire.core.config import EngineConfig
from quire.core.sampling import SamplingParams
from quire.core.stats import StartStats
from quire.core.step import SequenceUpdate, TokenLogprobs
from quire.engine.streams import Stream
from quire.engine.validation import Limits
from quire.link.client import NamedAdapters
from quire.link.messages import Described, Ready
from quire.server.app import create_app
from quire.server.served_models import ServedModel, ServedModels
from quire.server.service import Service
from quire.server.settings import ServerSettings

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
_CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


@cache
def byte_tokenizer() -> str:
    """One token for each byte, in the alphabet's order, and one special token behind them."""
    inner = Inner(models.BPE({character: index for index, character in enumerate(_CHARACTERS)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("</s>", special=True)])
    return inner.to_str()


def ids_of(text: str) -> tuple[int, ...]:
    visible = Inner.from_str(byte_tokenizer()).encode(text)
    return tuple(visible.ids)


class ScriptedEngine:
    """Stands for the engine's client; `script` holds the batches of updates that a stream gets one after another."""

    is_ready, status, num_restarts, num_failures, num_open, has_work = True, "ready", 0, 0, 0, False
    can_retry = False  # there is no other engine

    def __init__(self, script: Sequence[Iterable[SequenceUpdate]], fault: Exception | None = None) -> None:
        self.adapters = NamedAdapters(EngineConfig().adapters)
        self.script = list(script)
        self.fault = fault
        self.ready: Ready | None = None
        self.stopped: list[tuple[str, int]] = []
        self.requests: list[Any] = []

    def check_room(self, *_: Any) -> None:
        pass

    def stop(self, request_id: str, index: int) -> None:
        self.stopped.append((request_id, index))

    def submit(self, requests: Sequence[Any]) -> Stream[SequenceUpdate]:
        self.requests = list(requests)
        stream: Stream[SequenceUpdate] = Stream([one.request_id for one in requests], lambda _: None)
        self._task = asyncio.get_running_loop().create_task(self._play(stream))
        return stream

    async def _play(self, stream: Stream[SequenceUpdate]) -> None:
        for updates in self.script:
            for _ in range(30):  # the reader takes one batch before the next comes
                await asyncio.sleep(0)
            for update in updates:
                stream.push(replace(update, request_id=stream.request_ids[int(update.request_id)]))
        if self.fault is not None:
            for _ in range(30):
                await asyncio.sleep(0)
            stream.fail(self.fault)


def update(tokens: str | tuple[int, ...], index: int = 0, request: int = 0, **fields: Any) -> SequenceUpdate:
    token_ids = ids_of(tokens) if isinstance(tokens, str) else tokens
    return SequenceUpdate(str(request), index, token_ids, **fields)


def logprobs(tokens: str) -> dict[str, Any]:
    """An update's logprobs: each token's own, and the best two."""
    entries = [TokenLogprobs(one, -0.5, 1, (one, one + 1), (-0.5, -1.5)) for one in ids_of(tokens)]
    return {"logprobs": tuple(entries)}


def scripted_app(
    engine: ScriptedEngine, *, tokenizer: str | None = None, vocab_size: int = 257, **settings: Any
) -> ASGIApp:
    return create_app(scripted_service(engine, tokenizer=tokenizer, vocab_size=vocab_size, **settings))


def scripted_service(
    engine: ScriptedEngine, *, tokenizer: str | None = None, vocab_size: int = 257, **settings: Any
) -> Service:
    made = ServerSettings(**{"sse_keep_alive": 0.0, "embeddings": False, "data_dir": "none", **settings})
    client: Any = engine
    model = ServedModel("generate", client, made, made.served_names)
    config = {"chat_template": TEMPLATE, "eos_token": "</s>"}
    ready = Ready(
        model="scripted",
        pid=0,
        described=Described(tokenizer or byte_tokenizer(), config, config),
        default_sampling=SamplingParams(temperature=0.5, max_tokens=256),
        limits=Limits(vocab_size=vocab_size, max_model_len=4096, max_num_seqs=16),
        start=StartStats(num_threads=1, weights_bytes=0, seconds=0.0),
        lines=[],
    )
    engine.ready = ready
    model.serve(ready)
    return Service(ServedModels(made, model), made)


async def posted(app: ASGIApp, path: str, body: dict[str, Any]) -> tuple[int, list[bytes]]:
    """The status, and the pieces of the body as they were sent."""
    data, sent = json.dumps(body).encode(), []
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", b"req-1")],
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "server": ("test", 80),
        "client": ("test", 1),
        "asgi": {"version": "3.0"},
    }
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": data, "more_body": False})

    async def send(message: Any) -> None:
        sent.append(dict(message))

    await app(scope, inbox.get, send)
    return sent[0]["status"], [message["body"] for message in sent[1:] if message["body"]]


def normalised(data: bytes) -> str:
    """A stream without what differs between runs and versions: ids, times, the fingerprint."""
    text = re.sub(r"[0-9a-f]{32}|(?<=call_)[0-9a-f]{24}", "ID", data.decode())
    text = text.replace(f'"quire-{__version__}"', '"quire-VERSION"')
    return re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":0', text)
