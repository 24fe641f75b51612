"""Policies in words, for the lines that an engine prints at start: only those that are not the usual ones."""

from quire.core.config import MemoryConfig, SchedulerConfig

_RESERVATIONS = {
    "max": "memory reserved to max_model_len",
    "pow2": "memory reserved to the next power of two of max_tokens",
    "oracle": "memory reserved to max_tokens",
}
_SCHEDULES = {
    "priority": "lower priority values first",
    "shortest": "shortest requests first, with ageing",
    "fair": "fair shares among tenants",
}


def policies_in_words(memory: MemoryConfig, scheduler: SchedulerConfig) -> str:
    """Empty where everything is as usual: continuous batching, paging, first come, first served."""
    words = []
    if scheduler.batching != "continuous":
        size = scheduler.batch_size or scheduler.max_num_seqs
        window = (
            f", which wait {scheduler.batch_window_ms:g} ms at most"
            if scheduler.batching == "dynamic"
            else ""
        )
        words.append(f"{scheduler.batching} batches of up to {size} requests{window}")
    if memory.reservation != "paged":
        words.append(f"{_RESERVATIONS[memory.reservation]}, in one piece, no sharing (for comparison)")
    if scheduler.schedule != "fcfs":
        words.append(_SCHEDULES[scheduler.schedule])
    if scheduler.preset is not None:
        words.append(f"preset {scheduler.preset}")
    return "; ".join(words)
