"""How grants ended, for those who ask again: the answer may have been lost on its way."""

from __future__ import annotations

from collections import OrderedDict

from kvxfer.control.messages import Aborted, Confirmed, Done, Failed

MAX_REMEMBERED = 8192

Word = Done | Confirmed | Failed | Aborted


class LastWords:
    """The newest so many. A grant that is remembered is over: a request for it that comes late, or
    again, is answered and not computed. Control thread only."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._words: OrderedDict[tuple[str, str], Word] = OrderedDict()
        self._max_remembered = max_remembered

    def __len__(self) -> int:
        return len(self._words)

    def add(self, key: str, grant_id: str, word: Word) -> Word:
        """What was, or is about to be, said to peer `key`; the first word stands."""
        word = self._words.setdefault((key, grant_id), word)
        if len(self._words) > self._max_remembered:
            self._words.popitem(last=False)
        return word

    def of(self, key: str, grant_id: str) -> Word | None:
        return self._words.get((key, grant_id))
