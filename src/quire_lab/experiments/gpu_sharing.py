"""`gpu-sharing`: two engines, one decoding and one computing prompts, alone and beside each other."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from quire.core.errors import ConfigError
from quire_lab.benchmarks.gpu_sharing import (
    CPU_MODES,
    CPU_ROLES,
    MODES,
    ROLES,
    WITHOUT_MPS,
    mps_tool,
    run_mode,
)
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table

MIN_SUM, MAX_ITL = 1.3, 0.5  # of MPS with percentages over time slices: output tokens, and ITL p99
NO_GPU = (
    "no GPU here: time slices, green contexts, MPS and MPS with percentages need an NVIDIA GPU and "
    "nvidia-cuda-mps-control; on the CPU the same two engines share all cores, or have one each"
)
NO_MPS = "nvidia-cuda-mps-control is not on the PATH: the MPS modes were left out"
FAULT = "fault"  # the mode in which an engine is meant to end
PAIR = ("decodes", "prompts")


def run(setup: Setup) -> Finding:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    modes, notes = _modes(device)
    seconds = setup.pick(1.0, 6.0, 20.0)
    rows: list[dict[str, Any]] = []
    with setup.progress(len(modes), "modes") as bar:
        for mode in modes:
            bar.note(mode)
            rows += [
                {"mode": f"{mode} {row.get('split', '')}".strip(), **row}
                for row in run_mode(mode, device, seconds)
            ]
            bar()
    return _finding(rows, device, seconds, notes + _left_out(rows))


def _modes(device: str) -> tuple[tuple[str, ...], list[str]]:
    if device == "cuda":
        have = mps_tool() is not None
        modes = MODES if have else WITHOUT_MPS
        return tuple(mode for mode in modes if mode != "mig"), ([] if have else [NO_MPS])
    if len(os.sched_getaffinity(0)) > 1:
        return CPU_MODES, [NO_GPU]
    return CPU_MODES[:2], [NO_GPU, "one usable core: there is none to give each engine its own"]


def _why_not(row: Mapping[str, Any]) -> str:
    """Why a row's engine did not start, or failed while it was counted. Empty: it did neither."""
    parts = [f"exit {row['exit']}"] if "exit" in row else []
    return ": ".join([*parts, row["error"]] if row.get("error") else parts)


def _left_out(rows: list[dict[str, Any]]) -> list[str]:
    """A note for each mode with an engine that did not start or failed."""
    dead: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["mode"] != FAULT and (why := _why_not(row)):
            dead.setdefault((row["mode"], why), []).append(row["role"])
    return [f"left out: {mode} ({', '.join(roles)}): {why}" for (mode, why), roles in dead.items()]


def _whole_pairs(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """By mode and role. ConfigError where there is none: an engine that runs without its neighbour shows nothing."""
    pairs = {(row["mode"], row["role"]): row for row in rows if row["role"] in PAIR and row["mode"] != FAULT}
    broken = {mode for (mode, _), row in pairs.items() if _why_not(row)}
    if not (whole := {key: row for key, row in pairs.items() if key[0] not in broken}):
        raise ConfigError(
            f"no two engines ran: {'; '.join(_left_out(rows))}; two engines must fit in memory together"
        )
    return whole


def _after_a_fault(
    rows: list[dict[str, Any]], pairs: Mapping[tuple[str, str], Mapping[str, Any]]
) -> list[Table]:
    """What a neighbour's fault under MPS did to the engine beside it and to one that was started afterwards."""
    engines = {row["role"]: row for row in rows if row["mode"] == FAULT}
    if not engines:
        return []
    before = (
        f", alone {pairs['alone', 'prompts']['prompt_tok_s']:,.0f}" if ("alone", "prompts") in pairs else ""
    )
    neighbour = engines.get("fault", {})
    faulted = bool(neighbour.get("error")) and "exit" not in neighbour
    told = [["the neighbour", ("faulted: " if faulted else "did not fault: ") + (_why_not(neighbour) or "—")]]
    for role, name in (
        ("prompts", "the engine beside it"),
        ("restarted", "one started afterwards, same daemon"),
    ):
        if row := engines.get(role):
            why = _why_not(row)
            told.append(
                [name, f"ended: {why}" if why else f"{row['prompt_tok_s']:,.0f} prompt tokens/s{before}"]
            )
    return [Table("A neighbour that faults under MPS", ["engine", "what it did"], told, left=2)]


def _finding(rows: list[dict[str, Any]], device: str, seconds: float, notes: list[str]) -> Finding:
    pairs = _whole_pairs(rows)
    cells = [
        [
            mode, f"{decodes['output_tok_s']:,.0f}", _ms(decodes["itl_p99_ms"]), f"{prompts['prompt_tok_s']:,.0f}",
            _ms(prompts["ttft_p99_ms"]),
        ]
        for mode in dict.fromkeys(row["mode"] for row in rows)
        if (decodes := pairs.get((mode, "decodes"))) and (prompts := pairs.get((mode, "prompts")))
    ]  # fmt: skip
    shared, divided = ("time-slices", "mps-percent") if device == "cuda" else ("same-cores", "own-cores")
    checks, take_away = [], "Each engine alone and beside the other."
    ratios = {
        mode: _beside(pairs, mode, shared)
        for mode, role in pairs
        if mode.startswith(divided) and role == "decodes" and (shared, role) in pairs
    }
    if ratios:  # of several splits the lowest ITL, where the two together give enough
        divided, (ratio, itl) = min(ratios.items(), key=lambda item: (item[1][0] < MIN_SUM, item[1][1]))
        take_away = (
            f"{divided} gives {ratio:.2f} times the output tokens of {shared}, and its ITL p99 is "
            f"{itl:.2f} times as long."
        )
        if device == "cuda":
            checks = [
                Check(
                    f"{divided} gives {MIN_SUM} times the output tokens of {shared}",
                    f"{ratio:.2f}",
                    ratio >= MIN_SUM,
                ),
                Check(f"and its ITL p99 is at most {MAX_ITL} times as long", f"{itl:.2f}", itl <= MAX_ITL),
            ]
    head = ["mode", "decodes: tokens/s", "ITL p99, ms", "prompts: tokens/s", "TTFT p99, ms"]
    roles = CPU_ROLES if device == "cpu" else ROLES
    return Finding(
        take_away,
        [Table("Two engines", head, cells), *_after_a_fault(rows, pairs)],
        [],
        {"rows": rows},
        {"seconds": seconds, "device": device, "roles": {name: str(role) for name, role in roles.items()}},
        checks,
        [*notes, f"{seconds:g} s each; an engine is a process of its own"],
    )  # fmt: skip


def _beside(
    pairs: Mapping[tuple[str, str], Mapping[str, Any]], mode: str, shared: str
) -> tuple[float, float]:
    """Output tokens of both engines, and the ITL p99, over those of `shared`."""
    total = {
        name: sum(pairs[name, role]["output_tok_s"] for role in ("decodes", "prompts"))
        for name in (mode, shared)
    }
    itls = [pairs[name, "decodes"]["itl_p99_ms"] for name in (mode, shared)]
    return total[mode] / total[shared], itls[0] / itls[1] if all(itls) else float("nan")


def _ms(value: float | None) -> str:
    return "—" if value is None else f"{value:,.1f}"


EXPERIMENT = Experiment(
    "gpu-sharing",
    "What a neighbour costs",
    "Two engines share a GPU or the cores of a CPU. What does each lose, by the way in which they share?",
    run,
)
