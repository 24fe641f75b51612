"""MergedAdapterAdmission: one adapter at a time, merged into the weights: the baseline of batched adapters."""

from quire.core.errors import AdapterError
from quire.scheduler.adapter_admission import AdapterAdmission, Readiness
from quire.scheduler.queue import SequenceGroup

MERGE_TURN = 64  # requests that may start with one adapter before another gets its turn


class MergedAdapterAdmission(AdapterAdmission):
    """Requests of the merged adapter run together, others wait until they have ended. Takes no pages."""

    governs_all = True
    _merged: str | None = None
    _num_started = 0

    def prepare(
        self, group: SequenceGroup, reserved: int, alone: bool = False, early: bool = False
    ) -> Readiness:
        """As AdapterAdmission's, also for requests without an adapter: they need the unmerged model."""
        key = group.request.adapter
        if early:
            return Readiness.NO_ROOM
        if key != self._merged and not alone:
            return Readiness.LOADING if self._num_started < MERGE_TURN else Readiness.NO_ROOM
        if key == self._merged and self._num_started >= MERGE_TURN and not alone:
            return Readiness.NO_ROOM
        if key is not None and not self._pages.is_resident(key):
            try:
                copy = self._copies.want(key)
            except AdapterError as error:
                self.failed.append((group, error))
                return Readiness.FAILED
            if copy is None:
                return Readiness.LOADING
            self._pages.load(key, 0, copy.content)
        elif key is not None and key != self._merged and self._copies.want(key) is None:
            return Readiness.LOADING  # its host copy was evicted
        if key != self._merged:
            self._merged, self._num_started = key, 0
        self._num_started += 1
        return Readiness.READY
