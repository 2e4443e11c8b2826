"""Episodes of hardware trouble in a stream of samples: one event when one begins, one when it is over.

Cards that get into the same trouble within a few seconds of each other are one episode: eight cards at their power
limit are one thing to know. A card that follows later has an episode of its own.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fp8console.diagnosis import cards, conditions, ecc, wording
from fp8console.diagnosis.cards import Sample
from fp8console.diagnosis.conditions import Judgement
from fp8console.protocol.numbers import number

#: Seconds that the first card of an episode waits for others, and that its trouble must last to be told.
GATHER = 5.0
#: Seconds that all is well before an episode is over: a pause for an evaluation is not its end.
QUIET = 60.0
#: Troubles that don't wait: each of them is for one card, and soon is better than together.
AT_ONCE = ("ecc_uncorrectable", "ecc_correctable", "host_memory", "disk")
HOST = "host"


@dataclass
class _Trouble:
    """One card's part in an episode."""

    gpu: dict[str, Any]
    now: Judgement
    worst: float
    well_since: float | None = None


@dataclass
class _Episode:
    number: int
    what: str
    since: float
    troubles: dict[str, _Trouble]
    told: bool = False


class HardwareEpisodes:
    """Follows one run's samples."""

    def __init__(self) -> None:
        self._window: collections.deque[Sample] = collections.deque()
        self._episodes: list[_Episode] = []
        self._numbers = itertools.count(1)
        self._counters: dict[tuple[str, str], ecc.Counter] = {}

    @property
    def open(self) -> list[dict[str, Any]]:
        """The episodes under way, as they stand in a hardware record: episode, what, gpus, since."""
        return [
            {"episode": one.number, "what": one.what, "gpus": _indices(one), "since": one.since}
            for one in self._episodes
            if one.told
        ]

    def take(self, sample: Sample) -> list[dict[str, Any]]:
        """Takes in the next sample. Returns events without their time: kind "hardware" or "recovered", text, fields."""
        moment = number(sample.get("time"))
        if moment is None:
            return []
        if self._window and moment < (number(self._window[-1].get("time")) or 0.0):
            self._set_back(moment)
        self._window.append(sample)
        while (number(self._window[0].get("time")) or 0.0) <= moment - cards.WINDOW:
            self._window.popleft()
        for what, card, gpu, judgement in self._judgements(moment):
            self._follow(moment, what, card, gpu, judgement)
        return [event for episode in list(self._episodes) for event in self._events(moment, episode)]

    def _set_back(self, moment: float) -> None:
        """The host's clock was set back: nothing may wait until it comes by again."""
        self._window.clear()
        for counter in self._counters.values():
            counter.set_back(moment)
        for episode in self._episodes:
            episode.since = min(episode.since, moment)
            for trouble in episode.troubles.values():
                if trouble.well_since is not None:
                    trouble.well_since = min(trouble.well_since, moment)

    def _judgements(self, moment: float) -> Iterator[tuple[str, str, dict[str, Any], Judgement]]:
        window = list(self._window)
        for card, history in cards.histories(window).items():
            gpu = history[-1][1]
            for cause in cards.CAUSES:
                yield f"throttling_{cause}", card, gpu, conditions.throttling(cause, history)
            yield "memory", card, gpu, conditions.memory(history)
            for what in ("ecc_uncorrectable", "ecc_correctable"):
                counter = self._counters.setdefault((card, what), ecc.Counter(what == "ecc_correctable"))
                yield what, card, gpu, counter.judge(moment, cards.known(gpu, what), gpu.get("source"))
        yield "host_memory", HOST, {}, conditions.host_memory(window)
        yield "disk", HOST, {}, conditions.disk(window)

    def _follow(self, moment: float, what: str, card: str, gpu: dict[str, Any], judgement: Judgement) -> None:
        mine = [episode for episode in self._episodes if episode.what == what]
        inside = next((episode for episode in mine if card in episode.troubles), None)
        if inside is not None:
            trouble = inside.troubles[card]
            if judgement.value is None:
                return
            if not judgement.bad and not inside.told:
                del inside.troubles[card]  # gone before anybody was told
                return
            trouble.now = judgement
            trouble.worst = (min if what == "disk" else max)(trouble.worst, judgement.value)
            if judgement.bad is not False:
                trouble.well_since = None
            elif trouble.well_since is None:
                trouble.well_since = moment
        elif judgement.bad and judgement.value is not None:
            gathering = next((episode for episode in mine if not episode.told), None)
            if gathering is None:
                gathering = _Episode(0, what, moment, {})
                self._episodes.append(gathering)
            gathering.troubles[card] = _Trouble(gpu, judgement, judgement.value)

    def _events(self, moment: float, episode: _Episode) -> Iterator[dict[str, Any]]:
        if not episode.troubles:
            self._episodes.remove(episode)
        elif not episode.told:
            if episode.what in AT_ONCE or moment - episode.since >= GATHER:
                episode.told, episode.number = True, next(self._numbers)
                yield _begun(episode)
        elif all(_is_over(episode.what, trouble, moment) for trouble in episode.troubles.values()):
            self._episodes.remove(episode)
            yield _over(episode, moment)


def _is_over(what: str, trouble: _Trouble, moment: float) -> bool:
    # The counters of errors wait for quiet themselves.
    quiet = 0.0 if what.startswith("ecc_") else QUIET
    return trouble.well_since is not None and moment - trouble.well_since >= quiet


def _indices(episode: _Episode) -> list[Any]:
    return [trouble.gpu.get("index") for trouble in episode.troubles.values() if trouble.gpu]


def _begun(episode: _Episode) -> dict[str, Any]:
    troubles = list(episode.troubles.values())
    evidence = [
        {"gpu": one.gpu.get("index"), "bdf": one.gpu.get("bdf"), **one.now.evidence} if one.gpu else one.now.evidence
        for one in troubles
    ]
    return {
        "kind": "hardware",
        "text": wording.begun(episode.what, [one.gpu for one in troubles if one.gpu], evidence),
        "episode": episode.number,
        "what": episode.what,
        "gpus": _indices(episode),
        "since": episode.since,
        "evidence": evidence,
    }


def _over(episode: _Episode, moment: float) -> dict[str, Any]:
    gpus = [one.gpu for one in episode.troubles.values() if one.gpu]
    worse = min if episode.what == "disk" else max
    worst = worse(one.worst for one in episode.troubles.values())
    return {
        "kind": "recovered",
        "text": wording.over(episode.what, gpus, moment - episode.since, worst),
        "episode": episode.number,
        "of": episode.what,
        "gpus": _indices(episode),
        "since": episode.since,
        "until": moment,
        "worst": worst,
    }
