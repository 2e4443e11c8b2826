"""After which optimizer update an iteration of the training ends."""

from __future__ import annotations

from collections.abc import Hashable


class StepCycle:
    """Learns the order in which optimizers (or scaler updates) follow each other in one iteration.

    One key only: each update ends a step. Several (a GAN has two): the iteration is what lies between two starts of
    the first key, so the first iteration or two go by before its end is known; they end no step until then. A step
    boundary in the middle of an iteration would restore parameters under a live autograd graph.
    """

    #: Updates without the leading key after which it is taken to be gone (an optimizer was replaced).
    PATIENCE = 12
    #: The same, where the leading key had been alone for this many updates: it was most likely replaced.
    SOON = 5
    ALONE = 20
    #: Rounds that differ before only the last key of a round is looked at.
    IRREGULAR = 3
    #: Updates that end no step after which the cycle is learnt anew (the other optimizers are used no more).
    LONGEST = 64

    def __init__(self) -> None:
        self._leader: Hashable = None
        self._keys: set[Hashable] = set()
        self._current: list[Hashable] = []
        self._round: tuple[Hashable, ...] = ()
        self._mismatches = 0
        self._since_leader = 0
        self._since_end = 0
        self._alone = 0

    def closes(self, key: Hashable) -> bool:
        """Whether the update with this key ends a step."""
        if self._since_end >= self.LONGEST:
            self._learn_anew()
        ends = self._ends(key)
        self._since_end = 0 if ends else self._since_end + 1
        return ends

    def _ends(self, key: Hashable) -> bool:
        if self._leader is None:
            self._leader = key
        self._since_leader = 0 if key == self._leader else self._since_leader + 1
        patience = self.SOON if self._alone >= self.ALONE else self.PATIENCE
        if self._since_leader > patience and len(self._keys) > 1:
            self._learn_anew()
            return self._ends(key)
        self._keys.add(key)
        if len(self._keys) == 1:
            self._current = [key]
            self._alone += 1
            return True
        if key == self._leader and self._current and self._current[-1] != self._leader:
            self._end_of_round(tuple(self._current))
            self._current = []
        self._current.append(key)
        if self._mismatches >= self.IRREGULAR:
            return bool(self._round) and key == self._round[-1]
        return bool(self._round) and tuple(self._current) == self._round

    def _learn_anew(self) -> None:
        """Begin with what has followed the last round that was as expected: the new first key leads from now on."""
        gone = set(self._round) or {self._leader}
        since = [key for key in self._current if key not in gone]
        self.__init__()  # type: ignore[misc]
        for key in since:
            self._ends(key)

    def _end_of_round(self, found: tuple[Hashable, ...]) -> None:
        self._alone = 0
        if self._round and found != self._round:
            self._mismatches += 1
        self._round = found
