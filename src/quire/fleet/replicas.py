"""ReplicaSet: several engine processes that serve one model, used as one EngineClient is."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from quire.core.config import EngineConfig
from quire.core.errors import EngineDead, InvalidRequest, QueueFull, QuireError
from quire.core.request import EmbedRequest, QueueBounds, Request
from quire.core.sampling import SamplingParams
from quire.engine.streams import Stream
from quire.fleet.places import replica_configs
from quire.fleet.policies import DEFAULT, find_policy
from quire.fleet.prefixes import Prefix, prefix_of
from quire.fleet.router import Router
from quire.link.channel import Channel
from quire.link.client import EngineClient, message_of
from quire.link.messages import Add, Embed, FromEngine, Ready, Updates
from quire.link.relayed import RelayedEngine
from quire.link.step_log import StepRecord
from quire.link.supervise import STEP_SECONDS, Supervisor
from quire.observe.logs import get_logger

if TYPE_CHECKING:
    from quire.fleet.ray_cluster import RayCluster

log = get_logger(__name__)
START_SECONDS = 120.0  # for the other replicas, once one serves
DRAIN_SECONDS = 60.0  # for the requests of a replica that is to be restarted
READY_SECONDS = 600.0  # for a restarted replica, before the next one


class Replica(EngineClient):
    """One of the engines. Tells the router what becomes of its requests."""

    def __init__(
        self,
        config: EngineConfig,
        index: int,
        router: Router,
        bounds: QueueBounds,
        on_progress: Callable[[str, int, int], None] | None,
        engine_timeout: float,
        cluster: "RayCluster | None" = None,
    ) -> None:
        """With a `cluster` the engine runs on one of its machines."""
        self.replica = index
        self.role = config.memory.role
        self.draining = False  # it gets no new requests
        self._router = router
        self._load = router.loads[index]
        self.routing = self._load.stats
        self._unanswered: set[str] = set()  # requests without their first token
        self._prefill: Callable[[], Stream[Any]] | None = None  # for the requests that are being submitted
        self._handing_over: dict[str, asyncio.Task[None]] = {}  # by request
        supervised = None if cluster is None else partial(cluster.supervisor, config, index, engine_timeout)
        super().__init__(config, bounds, on_progress, engine_timeout, f"replica {index} engine", supervised)

    @property
    def takes_requests(self) -> bool:
        return self.is_ready and not self.draining

    def take(
        self,
        requests: Sequence[Request | EmbedRequest],
        messages: Sequence[Add | Embed],
        prefixes: Sequence[Prefix],
        prefill: Callable[[], Stream[Any]] | None = None,
    ) -> Stream[Any]:
        """As `submit`, and in the router's account. `prefill` lets another replica compute the prompts first."""
        self._prefill = prefill
        stream = self.submit(requests, messages)
        assert self.replica is not None
        for request, prefix in zip(requests, prefixes, strict=True):
            self._router.sent(request.request_id, prefix, self.replica)
            self._unanswered.add(request.request_id)
        return stream

    def _send(self, channel: Channel | RelayedEngine, stream: Stream[Any], encoded: list[bytes]) -> None:
        if self._prefill is None:
            super()._send(channel, stream, encoded)
            return
        task = asyncio.create_task(self._hand_over(self._prefill, channel, stream, encoded))
        self._handing_over.update(dict.fromkeys(stream.request_ids, task))

    async def _hand_over(
        self,
        prefill: Callable[[], Stream[Any]],
        channel: Channel | RelayedEngine,
        stream: Stream[Any],
        encoded: list[bytes],
    ) -> None:
        """Sends the requests once their prompts are computed elsewhere, or at once if they cannot be. Ended by
        `request_ended`: a client that leaves, or the death of this replica.
        """
        try:
            prompts = prefill()
            try:
                open_ids = set(prompts.request_ids)
                while open_ids:
                    ended = [update for update in await prompts.updates() if update.finish_reason is not None]
                    for update in ended:
                        open_ids.discard(update.request_id)
                        prompts.done(update.request_id)
            finally:
                prompts.close()
        except QuireError as fault:
            log.warning("replica %d computes a prompt itself: %s", self.replica, fault)
        for request_id in stream.request_ids:
            self._handing_over.pop(request_id, None)
        super()._send(channel, stream, encoded)

    def request_ended(self, request_id: str) -> None:
        task = self._handing_over.pop(request_id, None)
        if task is not None:
            task.cancel()
        super().request_ended(request_id)
        self._unanswered.discard(request_id)
        self._router.ended(request_id)

    def engine_up(self, ready: Ready, channel: Channel | RelayedEngine) -> None:
        if ready.pool is not None:
            self._load.shadow.max_tokens = ready.pool.num_tokens
        super().engine_up(ready, channel)

    def engine_down(self, fault: EngineDead) -> None:
        super().engine_down(fault)
        self._load.forget_cache()

    def engine_sent(self, message: FromEngine) -> None:
        if isinstance(message, Updates) and self._unanswered:
            self._note_first_tokens(message)
        super().engine_sent(message)

    def _note_first_tokens(self, message: Updates) -> None:
        tokens = message.tokens
        columns = zip(tokens.request_ids, tokens.num_cached, strict=True)
        others = ((update.request_id, update.num_cached) for update in message.others if update.token_ids)
        for request_id, num_cached in chain(columns, others):
            if request_id in self._unanswered:
                self._unanswered.remove(request_id)
                if self.role == "decode":
                    self._load.stats.handed_over += max(0, num_cached - self._router.known_tokens(request_id))
                self._router.first_token(request_id, num_cached)

    async def restart(self, seconds: float = DRAIN_SECONDS) -> None:
        """Finishes its requests, for that long at most, and starts another process; returns when that serves."""
        self.draining = True
        try:
            deadline = time.monotonic() + seconds
            while self.has_work and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            num_starts = self.num_restarts
            assert isinstance(self._supervisor, Supervisor)
            await self._supervisor.restart()
            deadline = time.monotonic() + READY_SECONDS
            while not (self.is_ready and self.num_restarts > num_starts):
                if time.monotonic() > deadline:
                    raise EngineDead(
                        f"replica {self.replica} is not ready after {READY_SECONDS:.0f} s: {self.status}"
                    )
                await asyncio.sleep(0.05)
        finally:
            self.draining = False

    def described(self) -> dict[str, Any]:
        """Its state, for operators."""
        return {
            "replica": self.replica,
            "role": self.role,
            "status": "draining" if self.draining and self.is_ready else self.status,
            "pid": self.ready.pid if self.ready is not None and self.is_ready else None,
            "node": self._supervisor.node if isinstance(self._supervisor, Supervisor) else None,
            "restarts": self.num_restarts,
            **self._load.described(),
            "sequences_running": self.queue.num_running,
            "requests_waiting": self.queue.num_waiting,
        }


class ReplicaSet:
    """Has what servers use of an EngineClient. A request goes to the replica that the policy prefers. If that ends,
    the request can be submitted again, which server/generation.py does where nothing was streamed.
    """

    replica = None

    def __init__(
        self,
        config: EngineConfig,
        bounds: QueueBounds,
        on_progress: Callable[[str, int, int], None] | None = None,
        engine_timeout: float = STEP_SECONDS,
        count: int = 2,
        policy: str = DEFAULT,
        roles: Sequence[str] = (),
        cluster: "RayCluster | None" = None,
    ) -> None:
        """`roles`: of each replica, by default that of `config`. `cluster`: where they run, by default here."""
        self.policy = policy
        self.router = Router(find_policy(policy), [0] * count)
        self.replicas = [
            Replica(
                own, index, self.router, bounds, on_progress if index == 0 else None, engine_timeout, cluster
            )
            for index, own in enumerate(
                (cluster.configs if cluster else replica_configs)(config, count, roles)
            )
        ]
        first = self.replicas[0]
        self.admission, self.adapters = first.admission, first.adapters
        for replica in self.replicas[1:]:  # one queue and one set of adapters for all
            replica.admission, replica.adapters = self.admission, self.adapters
        self._restarting: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ life

    @property
    def engines(self) -> Sequence[EngineClient]:
        return self.replicas

    async def start(self) -> Ready:
        """Returns when all replicas serve, or some do and others take long. Raises why a replica cannot start."""
        starts = [asyncio.create_task(replica.start()) for replica in self.replicas]
        try:
            done, others = await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
            if others and not any(start.exception() for start in done):
                done, others = await asyncio.wait(
                    starts, timeout=START_SECONDS, return_when=asyncio.FIRST_EXCEPTION
                )
            for start in done:
                start.result()
        except BaseException:
            for start in starts:
                start.cancel()
            raise
        for start in others:
            start.add_done_callback(_log_late)
        late = [replica.replica for replica in self.replicas if not replica.is_ready]
        if late:
            log.warning("replicas %s are not ready after %.0f s: requests go to others", late, START_SECONDS)
        return self.ready or starts[0].result()

    async def close(self) -> None:
        if self._restarting is not None:
            self._restarting.cancel()
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    def roll(self, wanted: Sequence[int] | None = None) -> "asyncio.Task[None]":
        """Restarts replicas one after the other, all of them by default; a call meanwhile returns the same task."""
        if self._restarting is None or self._restarting.done():
            numbers = range(len(self.replicas)) if wanted is None else wanted
            self._restarting = asyncio.create_task(self._roll([self.numbered(number) for number in numbers]))
        return self._restarting

    async def _roll(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            log.info("replica %d finishes %d requests and is restarted", replica.replica, replica.num_open)
            await replica.restart()

    def numbered(self, number: int) -> Replica:
        if not 0 <= number < len(self.replicas):
            raise InvalidRequest(
                f"there is no replica {number}: this server has 0 to {len(self.replicas) - 1}", "replica"
            )
        return self.replicas[number]

    # ------------------------------------------------------------------ state

    @property
    def ready(self) -> Ready | None:
        """Of the first replica that was ready: all have the same settings."""
        return next((replica.ready for replica in self.replicas if replica.ready is not None), None)

    @property
    def is_ready(self) -> bool:
        return any(replica.takes_requests for replica in self.replicas)

    can_retry = is_ready

    @property
    def status(self) -> str:
        down = [replica for replica in self.replicas if not replica.is_ready]
        if not down:
            return "ready"
        return f"{len(self.replicas) - len(down)} of {len(self.replicas)} replicas serve; {down[0].status}"

    @property
    def num_failures(self) -> int:
        """The server is in trouble when every replica is."""
        return min(replica.num_failures for replica in self.replicas)

    @property
    def has_work(self) -> bool:
        return any(replica.has_work for replica in self.replicas)

    # ------------------------------------------------------------------ requests

    def submit(self, requests: Sequence[Request | EmbedRequest]) -> Stream[Any]:
        """As EngineClient.submit, to the replica that the policy prefers. The prompts of one call stay together."""
        serving = self._serving()
        messages = [message_of(request) for request in requests]
        prefixes = [_prefix(request, message) for request, message in zip(requests, messages, strict=True)]
        prompts = [number for number in serving if self.replicas[number].role == "prefill"]
        decoding = [number for number in serving if number not in prompts]
        if any(
            isinstance(each, EmbedRequest) or each.sampling.prompt_logprobs is not None for each in requests
        ):
            prompts = []  # computed as a whole where they are asked for
        prefix, prefill = _together(prefixes), None
        order = self.router.order(prefix, decoding or serving)
        for number in order:
            if prompts and decoding and self.router.prefills_elsewhere(prefix, number):
                prefill = partial(self._compute, requests, prefixes, self.router.order(prefix, prompts)[0])
            try:
                return self.replicas[number].take(requests, messages, prefixes, prefill)
            except (QueueFull, EngineDead):
                if number == order[-1]:
                    raise  # else the next may have room
        raise AssertionError("there is at least one replica")

    def _compute(
        self, requests: Sequence[Request | EmbedRequest], prefixes: Sequence[Prefix], number: int
    ) -> Stream[Any]:
        """Lets a prefill replica compute the prompts, which leaves their blocks in the folder that all share."""
        prompts = [prompt_only(request) for request in requests if isinstance(request, Request)]
        return self.replicas[number].take(prompts, [message_of(prompt) for prompt in prompts], prefixes)

    def check_room(self, num_requests: int = 1, num_sequences: int = 1) -> None:
        """Raises if no replica has room."""
        *others, last = self._serving()
        for number in others:
            with suppress(QueueFull):
                return self.replicas[number].check_room(num_requests, num_sequences)
        return self.replicas[last].check_room(num_requests, num_sequences)

    def _serving(self) -> list[int]:
        serving = [number for number, replica in enumerate(self.replicas) if replica.takes_requests]
        if not serving:
            raise EngineDead(
                f"none of {len(self.replicas)} replicas serves: {self.status}: try again in some seconds"
            )
        return serving

    def stop(self, request_id: str, index: int) -> None:
        number = self.router.replica_of(request_id)
        if number is not None:
            self.replicas[number].stop(request_id, index)

    # ------------------------------------------------------------------ operators' calls, to every replica that serves

    async def _all(self, call: Callable[[Replica], Any]) -> list[Any]:
        return list(await asyncio.gather(*(call(self.replicas[number]) for number in self._serving())))

    async def reset_prefix_cache(self) -> None:
        await self._all(lambda replica: replica.reset_prefix_cache())
        for load in self.router.loads:
            load.shadow.clear()

    async def start_step_log(self) -> None:
        await self._all(lambda replica: replica.start_step_log())

    async def stop_step_log(self) -> Sequence[StepRecord]:
        """Of all replicas, in the order of time: one machine has one clock."""
        steps = chain.from_iterable(await self._all(lambda replica: replica.stop_step_log()))
        return sorted(steps, key=lambda step: step.started)

    async def load_adapter(self, name: str, path: str) -> None:
        """Returns when every replica serves it; a replica that is down loads it when it is back."""
        await self._all(lambda replica: replica.load_adapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        await self._all(lambda replica: replica.unload_adapter(name))


def _log_late(start: "asyncio.Task[Ready]") -> None:
    if not start.cancelled() and (fault := start.exception()) is not None:
        log.error("%s; it is not tried again: restart the server", fault)


def prompt_only(request: Request) -> Request:
    """The request that computes the prompt and one token, which is dropped."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    return replace(request, request_id=f"{request.request_id}-prefill", sampling=sampling)


def _prefix(request: Request | EmbedRequest, message: Add | Embed) -> Prefix:
    if isinstance(message, Embed) or isinstance(request, EmbedRequest):
        return Prefix(request.num_prompt_tokens, ())
    return prefix_of(message.prompt_token_ids, request.cache_salt, request.adapter)


def _together(prefixes: Sequence[Prefix]) -> Prefix:
    """The prompts of one call as one: mostly they begin alike."""
    if len(prefixes) == 1:
        return prefixes[0]
    return replace(prefixes[0], num_tokens=sum(prefix.num_tokens for prefix in prefixes))
