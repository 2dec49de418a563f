"""How grants ended, for those who ask again: the answer may have been lost on its way."""

from __future__ import annotations

from collections import OrderedDict

from kvxfer.control.admission_messages import Busy
from kvxfer.control.messages import Aborted, Confirmed, Done, Failed
from kvxfer.worker.peers import PeerTable

MAX_REMEMBERED = 8192

Word = Done | Confirmed | Failed | Aborted | Busy


class LastWords:
    """The newest so many. A grant that is remembered is over: a request for it that comes late, or
    again, is answered and not computed. Control thread only."""

    def __init__(self, peers: PeerTable, max_remembered: int = MAX_REMEMBERED) -> None:
        self._peers = peers
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

    def say(self, key: str, grant_id: str, word: Word) -> None:
        """The end of a grant. Also to a peer that was lost meanwhile: should it live, blocks wait
        for this."""
        self._peers.send(key, self.add(key, grant_id, word))

    def repeat(self, key: str, grant_id: str) -> bool:
        """Whether the grant is over; then that is said again."""
        word = self._words.get((key, grant_id))
        if word is not None:
            self._peers.send(key, word)
        return word is not None
