"""Memory that ranks share, and the disk tier behind it: files of whole blocks, found again by as many ranks."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.errors import EngineDead
from quire.core.layout import BlockLayout
from quire.core.request import ints
from quire.core.step import HostTransfers, Step
from quire.engine.build.rank_memory import RankTransfers, SharedArena
from quire.kernels import native
from quire.layers.attention import Pool
from quire.layers.factory import RankPart
from quire.parallel.cut import cut_model
from quire.parallel.group import Group
from quire.runner.disk_tier import HEADER, FileDiskTier
from tests.models import checkpoints
from tests.parallel.test_cut import BUILTIN

needs_native = pytest.mark.skipif(not native.available(), reason="ranks on a CPU need the native kernels")
LAYOUT = BlockLayout(num_layers=1, block_size=1, num_kv_heads=1, head_dim=2, dtype="float32")
SAMPLING = SamplingParams(temperature=0.7, seed=4, max_tokens=6, ignore_eos=True, logprobs=1)
PROMPTS = [{"prompt_token_ids": ids} for ids in checkpoints.prompts(*[40] * 5)]
# The pool holds two of the prompts, and a step half of one: others sample nothing.
SETTINGS = {
    "block_size": 4,
    "num_blocks": 24,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "num_threads": 1,
}


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """A busy machine reads and writes slowly."""
    monkeypatch.setattr("quire.memory.offload_cache.READ_TIMEOUT", 30.0)
    monkeypatch.setattr("quire.engine.prefill.MAX_WAIT", 30.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two ranks hold two and one of its key-value heads."""
    path = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 192, "intermediate_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}
    checkpoints.save(path, checkpoints.llama(**shape))
    return path


def started(model: Path, folder: Path, shape: tuple[int, int], **settings: Any) -> LLM:
    return LLM(
        str(model), use_tqdm=False, tensor_parallel_size=shape[0], pipeline_parallel_size=shape[1],
        kv_offload_gb=0.005, kv_offload_dir=str(folder), **{**SETTINGS, **settings},
    )  # fmt: skip


def answers(llm: LLM, sampling: SamplingParams = SAMPLING) -> list[Any]:
    """One after the other."""
    outputs = [llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS]
    llm.engine.check_integrity()
    return [(output.token_ids, output.cumulative_logprob, output.logprobs) for output in outputs]


@pytest.fixture(scope="module")
def wanted(model):
    with LLM(str(model), use_tqdm=False, **SETTINGS) as llm:
        return answers(llm)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if len(path.name) == 64)


@needs_native
def test_blocks_are_found_again_by_as_many_ranks_and_by_no_others(model, wanted, tmp_path):
    for shape in ((2, 1), (1, 2), (1, 1)):
        with started(model, tmp_path, shape) as llm:
            stats = llm.engine.memory.offload_cache.stats
            assert [answers(llm), answers(llm)] == [wanted] * 2
            assert stats.host_hits > 20
            assert stats.disk_hits == 0
    for shape in ((2, 1), (1, 2)):
        with started(model, tmp_path, shape, steps_in_flight=0) as llm:
            stats = llm.engine.memory.offload_cache.stats
            assert answers(llm) == wanted
            assert stats.disk_hits > 20
            assert stats.disk_faults == 0


@needs_native
def test_a_wrong_part_of_one_rank_and_a_missing_file_are_misses(model, wanted, tmp_path):
    with started(model, tmp_path, (2, 1)) as llm:
        assert answers(llm) == wanted
        own = llm.report.pool.block_bytes
    kept = files(tmp_path)
    assert {path.stat().st_size for path in kept} == {HEADER.size + own + own // 2}
    for i, path in enumerate(kept):
        data = bytearray(path.read_bytes())
        data[HEADER.size + own + 7] ^= 0x40  # of rank 1
        if i % 3 == 0:
            path.write_bytes(data)
        elif i % 3 == 1:
            path.unlink()
    with started(model, tmp_path, (2, 1)) as llm:
        assert answers(llm) == wanted
        assert llm.engine.memory.offload_cache.stats.disk_faults > 0
        llm.engine.reset_prefix_cache()
        assert not files(tmp_path)
        assert answers(llm) == wanted


@needs_native
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_prompts_of_a_prefill_engine_are_decoded_by_another(model, wanted, tmp_path, shape):
    """All full blocks are files when an answer ends, and those of all but the last token are read."""
    with started(model, tmp_path, shape, role="prefill") as llm:
        first = answers(llm, SAMPLING.changed(max_tokens=1))
        assert len(files(tmp_path)) == len(PROMPTS) * 10
    assert [tokens for tokens, *_ in first] == [tokens[:1] for tokens, *_ in wanted]
    with started(model, tmp_path, shape, role="decode") as llm:
        assert answers(llm) == wanted
        assert llm.engine.memory.offload_cache.stats.disk_hits == len(PROMPTS) * 9


def two_ranks(tier: FileDiskTier | None = None) -> tuple[list[RankTransfers], list[SharedArena]]:
    """Each has a pool of its own number, and one host block of four."""
    shared = torch.zeros(2, 4096, dtype=torch.uint8)
    arenas = [SharedArena(LAYOUT.block_bytes, 4, part) for part in shared]
    made = []
    for rank in range(2):
        part = RankPart(cut_model(BUILTIN, rank, 2), Group(rank, 2), world=Group(rank, 2), shared=shared)
        pool = Pool(LAYOUT, 3)
        pool.data.fill_(rank + 1)
        made.append(RankTransfers(part, pool, arenas, lambda arena, wait: None))
    return made, arenas


def a_step() -> Step:
    moves = HostTransfers(ints((1,)), ints((2,)), ints(), ints())
    return Step(1, (), ints(), ints(), ints(), ints(), ints(), moves=moves)


def test_a_move_is_made_once_every_rank_has_made_it():
    ranks, arenas = two_ranks()
    ranks[0].move(a_step())
    assert [each.num_moved() for each in ranks] == [0, 0]
    assert not ranks[0].wait_moved(1, 0.01)
    ranks[1].move(a_step())
    assert [each.num_moved() for each in ranks] == [1, 1]
    assert ranks[0].wait_moved(1, 0.0)
    assert [int(arena.blocks(2)[0, 0]) for arena in arenas] == [1, 2]


def test_a_close_does_not_wait_for_writes_that_a_lost_rank_holds_up(tmp_path):
    ranks, arenas = two_ranks()
    tier = ranks[0].disk_tier = FileDiskTier(tmp_path, arenas, ranks[0].wait_moved, 1 << 20)
    ranks[0].move(a_step())
    for host in (1, 2, 3):
        assert tier.write(bytes([host]) * 32, host, 1)

    def lost() -> None:
        raise EngineDead("rank 1 is gone")

    ranks[0]._world.check = lost
    before = time.monotonic()
    ranks[0].close()
    assert time.monotonic() - before < 4.0  # of the five that a close waits at most
    assert not files(tmp_path)
