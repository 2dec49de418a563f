"""The one place that decides the layout of each group, and says why.

| rank | who                                                            |
| ---  | ---                                                            |
| 1    | a test's override                                              |
| 2    | the attention backend, where it works with one layout only     |
| 3    | the user: the flag, then KVXFER_KV_CACHE_LAYOUT                |
| 4    | the preference of a connector, if the user named the connector |
| 5    | LBNHC                                                          |

A user who asks for other than what rank 2 forces is told so; ranks 4 and 5 give way in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import GroupKind
from kvxfer.errors import UsageError

DEFAULT_LAYOUT = KVCacheLayout.LBNHC
FIELD = "kv_cache_layout"


@dataclass(frozen=True, slots=True)
class Wish:
    """What one of the ranks wants: '' (nothing), a layout for all groups, or kind=layout pairs
    separated by commas, which leave the other kinds to lower ranks."""

    text: str
    reason: str

    def by_kind(self) -> dict[GroupKind, KVCacheLayout]:
        """Raises UsageError for text that names no layout or no kind."""
        if not self.text:
            return {}
        if "=" not in self.text:
            layout = KVCacheLayout.parse(FIELD, self.text)
            return dict.fromkeys(GroupKind, layout)
        found = {}
        for pair in self.text.split(","):
            kind, _, layout_name = pair.partition("=")
            if kind.strip() not in list(GroupKind):
                known = ", ".join(GroupKind)
                raise UsageError(FIELD, self.text, f"{kind.strip()!r} is none of {known}")
            found[GroupKind(kind.strip())] = KVCacheLayout.parse(FIELD, layout_name.strip())
        return found


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    layout: KVCacheLayout
    reason: str


def choose_layouts(
    kinds: Sequence[GroupKind], override: Wish, forced: Wish, asked: Wish, preferred: Wish
) -> list[LayoutChoice]:
    """One choice for each group. Raises UsageError when `asked` is malformed, names a kind that no
    group has, or contradicts `forced` (unless a test overrides both)."""
    wanted = asked.by_kind()
    if "=" in asked.text and (unknown := wanted.keys() - set(kinds)):
        names = ", ".join(dict.fromkeys(kinds))
        raise UsageError(FIELD, asked.text, f"no group is {min(unknown)}: there are {names}")
    ranked = [(w, w.by_kind()) for w in (override, forced, asked, preferred)]
    choices = []
    for kind in kinds:
        found = next((w for w in ranked if kind in w[1]), None)
        if found is None:
            choices.append(LayoutChoice(DEFAULT_LAYOUT, "the default"))
            continue
        layout = found[1][kind]
        if found[0] is forced and wanted.get(kind, layout) is not layout:
            why = f"{asked.reason}, but {forced.reason} needs {layout} for {kind} groups"
            raise UsageError(FIELD, asked.text, why)
        choices.append(LayoutChoice(layout, found[0].reason))
    return choices
