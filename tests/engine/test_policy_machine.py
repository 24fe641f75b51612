"""The engine machine once more, under every policy: they change when things happen, never what is said."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from quire.core.config import BATCHING, RESERVATIONS, SCHEDULES, MemoryConfig, SchedulerConfig
from quire.engine.policies import make_memory
from tests.engine.test_engine_machine import EngineMachine

POLICIES = st.fixed_dictionaries(
    {
        "steps_in_flight": st.sampled_from([0, 1]),
        "batching": st.sampled_from(BATCHING),
        "schedule": st.sampled_from(SCHEDULES),
        "batch_size": st.sampled_from([None, 1, 2]),
        "max_prompt_chunk": st.sampled_from([None, 1, 3]),
        "preemption_mode": st.sampled_from(["recompute", "swap"]),
        "admit_after": st.sampled_from(["resumed", "completed"]),
    }
)


class PolicyMachine(EngineMachine):
    @initialize(
        num_blocks=st.integers(3, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(2, 6),
        max_tokens=st.integers(1, 12),
        policies=POLICIES,
        reservation=st.sampled_from(RESERVATIONS),
        drafting=st.sampled_from([None, None, 0.5]),
    )
    def start(self, num_blocks, block_size, max_num_seqs, max_tokens, policies, reservation, drafting):
        if reservation != "paged":
            num_blocks, block_size = 2 * num_blocks, 1
        options = MemoryConfig(block_size=block_size, reservation=reservation)
        memory = make_memory(options, num_blocks, 32, num_swap_blocks=100)
        config = SchedulerConfig(
            max_num_seqs, max_tokens, max_queue_requests=8, batch_window_ms=2.0, **policies
        )
        self.build(config, memory, drafting, adaptive=False)


PolicyMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPolicyMachine = PolicyMachine.TestCase
