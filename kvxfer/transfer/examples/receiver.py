"""The decode side of the example: grants blocks, grows, pulls, shrinks, and checks every byte."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvxfer.errors import KvxferError
from kvxfer.transfer.endpoint import Endpoint
from kvxfer.transfer.examples.setting import (
    NUM_TOKENS,
    TIMEOUT_S,
    blocks_of_prompt,
    endpoint,
    options,
)
from kvxfer.transfer.examples.wire import Wire
from kvxfer.transfer.pattern import check_pattern


def main(argv: Sequence[str] | None = None) -> None:
    given = options("BLNHC", 32, argv)
    with endpoint("receiver", given, NUM_TOKENS) as receiver:
        wire = Wire.listen(given.address, receiver.poll)
        receiver.register()
        wire.send(receiver.describe("sender"))
        lanes = receiver.connect("sender", wire.receive())
        print("receiver: lanes to the sender:", *lanes)

        grant(receiver, wire, 0, given.block_size)

        before = receiver.num_blocks[0]
        receiver.grow(1 + 3 * NUM_TOKENS // given.block_size)
        wire.send(receiver.update())
        receiver.acknowledge("sender", wire.receive())  # it knows the new blocks now
        print(f"receiver: grew from {before} to {receiver.num_blocks[0]} blocks")
        grant(receiver, wire, 1, given.block_size)
        check(receiver, 0, given.block_size)  # growth has moved no byte

        blocks = blocks_of_prompt(2, given.block_size)
        ticket = receiver.pull("sender", wire.hear()["blocks"], blocks)
        ticket.wait(TIMEOUT_S)
        print(f"receiver: pulled {ticket.num_bytes} bytes of prompt 2 by {ticket.lane}")
        check(receiver, 2, given.block_size)
        wire.tell(pulled=2)

        wire.send(receiver.revoke(before))
        receiver.acknowledge("sender", wire.receive())  # it touches them no more
        print(f"receiver: gave {receiver.release()} bytes back")
        receiver.check_conservation()
        receiver.acknowledge("sender", wire.receive())  # it has left
        wire.send(receiver.disconnect("sender"))
        wire.close()


def grant(receiver: Endpoint, wire: Wire, prompt: int, block_size: int) -> None:
    """A right to push into the prompt's blocks; waits until it was used."""
    wire.tell(blocks=blocks_of_prompt(prompt, block_size))
    wire.hear()
    check(receiver, prompt, block_size)


def check(receiver: Endpoint, prompt: int, block_size: int) -> None:
    if not check_pattern(receiver.views[0], blocks_of_prompt(prompt, block_size), seed=prompt):
        sys.exit(f"receiver: error: prompt {prompt} is not what was computed")
    print(f"receiver: prompt {prompt}: every byte is right")


if __name__ == "__main__":
    try:
        main()
    except (KvxferError, OSError) as error:
        sys.exit(f"receiver: error: {error}")
