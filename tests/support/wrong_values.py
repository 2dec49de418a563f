"""Values that nobody should send: any bytes, real ones with a few changed, and values of the right
type, made from msgspec's types themselves."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from msgspec import inspect

EDGE_INTS = (0, 1, -1, 2, 3, 4, 7, 63, 64, 65, 255, 4096, 2**31 - 1, 2**31, -(2**31), 2**32,
             2**47, 2**63 - 1, -(2**63), 2**63, 2**64 - 1)  # fmt: skip
EDGE_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-9, 0.5, 1e308, 5e-324, float("nan"), float("inf"))
EDGE_TEXTS = (
    *("", "0", "\0", "x" * 300, "../../etc/passwd", "\n\x1b[2J", "é"),
    *("loopback/push", "loopback/pull", "none/pull", "prefill-0", "decode-0", "prefill", "decode"),
)
EDGE_BYTES = (b"", b"\0", b"\xff" * 40, bytes(4096))

DEPTH = 5000
"""Of lists in lists. Python's recursion ends at 1000."""


class WrongValues:
    """A reproducible source of them. `texts`, which users may change, are drawn for strings."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.texts = list(EDGE_TEXTS)

    def random_bytes(self) -> bytes:
        longest = self.random.choice((8, 64, 512, 4096))
        return self.random.randbytes(self.random.randrange(longest))

    def mutated(self, real: bytes) -> bytes:
        data = bytearray(real)
        for _ in range(self.random.choice((1, 1, 2, 8))):
            at = self.random.randrange(len(data)) if data else 0
            match self.random.randrange(5):
                case 0 if data:
                    data[at] ^= 1 << self.random.randrange(8)
                case 1 if data:
                    data[at] = self.random.randrange(256)
                case 2:
                    del data[at:]
                case 3:
                    data[at:at] = self.random.randbytes(self.random.randrange(9))
                case _:
                    del data[at : at + self.random.randrange(9)]
        return bytes(data)

    def deeper(self, real: bytes) -> bytes:
        """`real`, a map or a list, with something more in it: lists in lists."""
        value = msgspec.msgpack.decode(real)
        if isinstance(value, dict):
            value["surplus"] = DEPTH
        elif isinstance(value, list):
            value.append(DEPTH)
        whole: bytes = msgspec.msgpack.encode(value)
        return whole.replace(msgspec.msgpack.encode(DEPTH), b"\x91" * DEPTH + b"\xc0")

    def change(self, value: Any) -> None:
        """One of the values inside, but for the names of types."""
        leaves = [leaf for leaf in leaves_of(value) if leaf[1] != "type"]
        if leaves:
            holder, key, leaf = self.random.choice(leaves)
            holder[key] = self.another(leaf)

    def another(self, leaf: Any) -> Any:
        """Mostly of the same type."""
        choose = self.random
        if choose.random() < 0.03:
            leaf = choose.choice((None, True, 1, 1.0, "", b"", [], {}))
        match leaf:
            case bool():
                return not leaf
            case int():
                return choose.choice((*EDGE_INTS, min(leaf + 1, EDGE_INTS[-1]), max(0, leaf - 1)))
            case float():
                return choose.choice(EDGE_FLOATS)
            case str():
                return choose.choice(self.texts)
            case bytes():
                return choose.choice((*EDGE_BYTES, leaf[:-1], leaf + b"\0"))
            case list():
                return choose.choice(([], leaf * 2, leaf[1:], leaf[::-1]))
        return leaf

    def make(self, kind: Any, depth: int) -> Any:
        choose = self.random
        match kind:
            case inspect.StructType(fields=fields, tag=tag, tag_field=tag_field):
                made = {one.encode_name: self.make(one.type, depth + 1) for one in fields}
                made = {tag_field: tag, **made} if tag_field else made
                return list(made.values()) if kind.array_like else made
            case inspect.DataclassType(fields=fields):
                return {one.encode_name: self.make(one.type, depth + 1) for one in fields}
            case inspect.UnionType(types=types):
                return self.make(choose.choice(types), depth + 1)
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                many = choose.choice((0, 1, 1, 1, 2, 3))
                return [self.make(item, depth + 1) for _ in range(many)]
            case inspect.TupleType(item_types=items):
                return [self.make(item, depth + 1) for item in items]
            case inspect.DictType(key_type=key, value_type=value):
                pairs = range(choose.randrange(3))
                return {self.make(key, depth): self.make(value, depth) for _ in pairs}
            case inspect.IntType():
                return choose.choice((*EDGE_INTS, 1, 4, 4))
            case inspect.FloatType():
                return choose.choice(EDGE_FLOATS)
            case inspect.StrType():
                return choose.choice(self.texts)
            case inspect.BytesType():
                return choose.choice(EDGE_BYTES)
            case inspect.BoolType():
                return choose.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.EnumType(cls=cls):
                return choose.choice([one.value for one in cls])
            case inspect.LiteralType(values=values):
                return choose.choice(values)
        raise TypeError(f"no values for {kind}: teach `make`")


def leaves_of(value: Any) -> list[tuple[Any, Any, Any]]:
    """(holder, key, value) of everything inside, lists themselves too."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in list(pairs):
        if not isinstance(inner, dict):
            found.append((value, key, inner))
        if isinstance(inner, dict | list):
            found += leaves_of(inner)
    return found
