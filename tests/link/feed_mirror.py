"""What a page knows of an engine: built from the records of its feed alone."""

import base64
import json
from collections import Counter
from typing import Any

from quire.link.feed import SHARED, state_name


class FeedMirror:
    def __init__(self) -> None:
        self.states = bytearray()
        self.sequences: dict[int, dict[str, Any]] = {}
        self.steps: list[list[float]] = []
        self.events: Counter[str] = Counter()
        self.record: dict[str, Any] = {}
        self.counters: dict[str, float] = {}
        self.num_records = 0

    def take(self, data: bytes | str) -> None:
        record = self.record = json.loads(data)
        self.num_records += 1
        if "pool" in record:
            self.states = bytearray(record["pool"]["num_blocks"] + 1)
            self.sequences = {}
        self._runs(base64.b64decode(record["blocks"]))
        for new in record.get("new", ()):
            self.sequences[new["n"]] = {**new, "table": []}
        for number, phase, known, computed, hosts, *change in record.get("sequences", ()):
            shown = self.sequences[number]
            shown.update(phase=phase, known=known, computed=computed, hosts=hosts)
            if change:
                start, blocks = change
                shown["table"][start:] = blocks
        for number in record.get("gone", ()):
            del self.sequences[number]
        self.counters |= record["counters"]
        self.steps += record["steps"]
        for name, blocks in record["events"].items():
            self.events[name] += len(blocks)

    def _runs(self, data: bytes) -> None:
        position, block = 0, 1

        def number() -> int:
            nonlocal position
            value = shift = 0
            while True:
                byte = data[position]
                position += 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    return value

        while position < len(data):
            block += number()
            length = number()
            self.states[block : block + length] = bytes([data[position]]) * length
            position += 1
            block += length

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(state_name(state) for state in self.states[1:]))

    def references(self, block: int) -> int:
        return max(0, self.states[block] - SHARED)
