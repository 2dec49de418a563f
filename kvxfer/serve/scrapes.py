"""What workers tell of their metrics, on its way to who asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvxfer.control.facts import WorkerFacts


class Scrape:
    """One question to all workers. Every worker ends up in `texts` or in `num_failed`, once."""

    def __init__(self, workers: Mapping[str, WorkerFacts]) -> None:
        """By key; they are asked by the caller."""
        self._workers = dict(workers)
        self.missing = set(workers)
        """Keys of those that have not answered."""
        self.texts: list[tuple[WorkerFacts, str]] = []
        self.num_failed = 0
        self.on_done: Callable[[], None] = lambda: None
        """Called when nobody is missing any more."""

    def told(self, key: str, text: str) -> None:
        if key in self.missing:
            self.texts.append((self._workers[key], text))
            self._over(key)

    def failed(self, key: str) -> None:
        if key in self.missing:
            self.num_failed += 1
            self._over(key)

    def give_up(self) -> None:
        """Whoever has not answered by now has failed."""
        for key in list(self.missing):
            self.failed(key)

    def _over(self, key: str) -> None:
        self.missing.discard(key)
        if not self.missing:
            self.on_done()


class Scrapes:
    """Those under way. An answer is as good for one as for the other."""

    def __init__(self) -> None:
        self._open: list[Scrape] = []

    def add(self, scrape: Scrape) -> None:
        self._open = [*filter(_is_open, self._open), *filter(_is_open, [scrape])]

    def told(self, key: str, text: str) -> None:
        for scrape in self._open:
            scrape.told(key, text)
        self._open = list(filter(_is_open, self._open))

    def lost(self, key: str) -> None:
        """A worker that will not answer any more."""
        for scrape in self._open:
            scrape.failed(key)


def _is_open(scrape: Scrape) -> bool:
    return bool(scrape.missing)
