"""The engine link over TCP: keys on both ends, an engine that ends with its connection, garbage that ends nothing."""

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.link.messages import Note, encode, framed_config
from quire.link.remote import REFUSED, SILENT_SECONDS, UNREACHABLE, RemoteChannel, RemoteWorkerChannel
from quire.observe.host import python_command

KEYS = zmq.curve_keypair()
STUB = """import os, sys, time
from multiprocessing.connection import Connection
reports = Connection(int(sys.argv[2]), readable=False)  # open as long as the rank runs
reports."""


@contextlib.asynccontextmanager
async def listening():
    channel = RemoteChannel("127.0.0.1")
    channel.allow(KEYS[0])
    try:
        yield channel
    finally:
        channel.close()


def engine_side(context: zmq.asyncio.Context, channel: RemoteChannel, keys=KEYS) -> zmq.asyncio.Socket:
    end = context.socket(zmq.DEALER)
    end.linger = 0
    end.curve_serverkey, (end.curve_publickey, end.curve_secretkey) = channel.key, keys
    end.connect(channel.path)
    return end


@pytest.mark.parametrize("wrong", ["the engine's key", "the server's key", "no server"])
def test_an_engine_with_a_wrong_key_or_address_ends_with_one_line(wrong: str, caplog) -> None:
    async def run() -> None:
        async with listening() as channel:
            lost = asyncio.create_task(channel.lost())
            own = zmq.curve_keypair() if wrong == "the engine's key" else KEYS
            server = zmq.curve_keypair()[0] if wrong == "the server's key" else channel.key
            silent = socket.socket()  # holds the port, and does not listen
            silent.bind(("127.0.0.1", 0))
            nothing = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            address = nothing if wrong == "no server" else channel.path
            engine = await asyncio.create_subprocess_exec(
                *python_command("quire.link.worker", address, 2),
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            assert engine.stdin is not None
            engine.stdin.write(server + own[0] + own[1] + framed_config(EngineConfig()))
            _, printed = await asyncio.wait_for(engine.communicate(), 60)
            silent.close()
            lines = printed.decode().strip().splitlines()
            assert len(lines) == 1
            if wrong == "no server":
                assert engine.returncode == UNREACHABLE
                assert "cannot reach the server at" in lines[0]
                assert "--data-parallel-rpc-port" in lines[0]
            else:
                assert engine.returncode == REFUSED
                assert "keys do not match" in lines[0]
                deadline = time.monotonic() + 30
                while "without the right key was refused" not in caplog.text:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.01)
            assert address in lines[0]
            assert not lost.done()  # no engine was connected
            lost.cancel()

    asyncio.run(run())


def test_a_port_in_use_is_named() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} .*in use.*--data-parallel-rpc-port"):
                RemoteChannel("127.0.0.1", port)
        RemoteChannel("127.0.0.1", port).close()

    asyncio.run(run())


def test_a_channel_connects_right_after_another_was_closed() -> None:
    async def run() -> None:
        for number in range(20):
            async with listening() as channel:
                with zmq.asyncio.Context() as context:
                    end = engine_side(context, channel)
                    await end.send(encode(Note(str(number))))
                    assert await asyncio.wait_for(channel.receive(), 30) == Note(str(number))
                    end.close()

    asyncio.run(run())


def test_a_lost_connection_is_noticed_at_once() -> None:
    async def run() -> None:
        async with listening() as channel:
            lost = asyncio.create_task(channel.lost())
            with zmq.asyncio.Context() as context:
                end = engine_side(context, channel)
                await end.send(encode(Note("here")))
                assert await channel.receive() == Note("here")
                socket.create_connection(("127.0.0.1", int(channel.path.rpartition(":")[2]))).close()
                await asyncio.sleep(0.2)
                assert not lost.done()  # that was another connection
                end.close()
                await asyncio.wait_for(lost, 0.8 * SILENT_SECONDS)  # not for want of heartbeats

    asyncio.run(run())


def rank_beside(folder, program: str, channel: RemoteChannel) -> "subprocess.Popen[bytes]":
    """What stands beside a rank on another machine; the rank's program is this one."""
    (folder / "rank_stub.py").write_text(program)
    start = "from quire.link import remote_peer; remote_peer.PEER = 'rank_stub'; remote_peer.main()"
    beside = subprocess.Popen(
        [sys.executable, "-c", start, channel.path, "-1", "1"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )
    assert beside.stdin is not None
    beside.stdin.write(channel.key + KEYS[0] + KEYS[1])
    beside.stdin.flush()
    return beside


def test_a_rank_that_exits_elsewhere_reports_first_and_its_code_is_passed_on(tmp_path) -> None:
    async def run() -> None:
        async with listening() as channel:
            program = STUB + "send_bytes(b'why'); os._exit(3)"
            beside = rank_beside(tmp_path, program, channel)
            assert await asyncio.wait_for(channel.socket.recv(), 60) == b"why"
            assert await asyncio.to_thread(beside.wait, 60) == 3
            assert beside.stderr.read() == b""

    asyncio.run(run())


def test_a_rank_elsewhere_ends_with_the_connection_also_while_it_reads_no_stdin(tmp_path) -> None:
    async def run() -> int:
        async with listening() as channel:
            program = STUB + "send_bytes(b'%d' % os.getpid()); time.sleep(60)"
            beside = rank_beside(tmp_path, program, channel)
            pid = int(await asyncio.wait_for(channel.socket.recv(), 60))
        assert await asyncio.to_thread(beside.wait, 60) == 0
        return pid

    pid, deadline = asyncio.run(run()), time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_ended_is_heard_although_a_step_came_after() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as client, context.socket(zmq.PAIR) as own:
        client.bind("inproc://rank")
        own.connect("inproc://rank")
        channel = object.__new__(RemoteWorkerChannel)
        channel._socket = own
        stdin, target = Pipe(duplex=False)
        stdin.close()  # the rank's
        reports, end = Pipe(duplex=False)
        end.send_bytes(b"why")
        end.close()
        client.send(b"a step")
        with target, reports:
            channel.pass_on(target, reports)
        assert client.recv() == b"why"


def test_random_bytes_with_and_without_a_key_end_nothing(caplog) -> None:
    """10,000 frames of an engine with the right key, and as many pieces of bytes from connections without one."""
    caplog.set_level("ERROR")
    drawn = random.Random(0)

    async def run() -> None:
        async with listening() as channel:
            lost = asyncio.create_task(channel.lost())
            port = int(channel.path.rpartition(":")[2])
            with zmq.asyncio.Context() as context:
                end = engine_side(context, channel)
                await end.send(encode(Note("first")))
                assert await channel.receive() == Note("first")
                for connection in range(100):
                    with socket.create_connection(("127.0.0.1", port)) as raw, contextlib.suppress(OSError):
                        if connection % 2:
                            # ZMTP's greeting
                            raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48))
                        for _ in range(100):
                            raw.sendall(drawn.randbytes(drawn.randrange(1, 100)))
                    await asyncio.sleep(0)
                for _ in range(10_000):
                    await end.send(drawn.randbytes(drawn.randrange(0, 100)))
                await end.send(encode(Note("last")))
                assert await asyncio.wait_for(channel.receive(), 120) == Note("last")
                assert not lost.done()
                lost.cancel()
                end.close()

    asyncio.run(run())
