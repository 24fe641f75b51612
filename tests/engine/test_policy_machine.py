"""The engine machine once more, under every policy: they change when things happen, never what is said."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from quire.core.config import SchedulerConfig
from quire.memory.paged import PagedMemory
from tests.engine.test_engine_machine import EngineMachine


class PolicyMachine(EngineMachine):
    @initialize(
        num_blocks=st.integers(3, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        max_tokens=st.integers(1, 12),
        in_flight=st.sampled_from([0, 1]),
        drafting=st.sampled_from([None, None, 0.5]),
        batching=st.sampled_from(["static", "dynamic", "continuous"]),
        batch_size=st.sampled_from([None, 1, 2]),
        chunk=st.sampled_from([None, 1, 3]),
    )
    def start(
        self, num_blocks, block_size, max_num_seqs, max_tokens, in_flight, drafting, batching, batch_size, chunk
    ):  # fmt: skip
        memory = PagedMemory(num_blocks, block_size, "test")
        config = SchedulerConfig(
            max_num_seqs, max_tokens, max_queue_requests=8, steps_in_flight=in_flight, batching=batching,
            batch_size=min(batch_size or max_num_seqs, max_num_seqs), batch_window_ms=2.0, max_prompt_chunk=chunk,
        )  # fmt: skip
        self.build(config, memory, drafting, adaptive=False)


PolicyMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPolicyMachine = PolicyMachine.TestCase
