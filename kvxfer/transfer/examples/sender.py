"""The prefill side of the example: fills blocks, pushes them, and lets others be pulled."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

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
from kvxfer.transfer.pattern import write_pattern


def main(argv: Sequence[str] | None = None) -> None:
    given = options("LBHNC", 16, argv)
    with endpoint("sender", given, 3 * NUM_TOKENS) as sender:
        wire = Wire.dial(given.address, sender.poll)
        sender.register()
        wire.send(sender.describe("receiver"))
        lanes = sender.connect("receiver", wire.receive())
        print("sender: lanes to the receiver:", *lanes)

        push_prompt(sender, wire, 0, given.block_size)
        wire.send(sender.apply("receiver", wire.receive()))  # the receiver has grown
        push_prompt(sender, wire, 1, given.block_size)

        source = compute(sender, 2, given.block_size)
        wire.tell(blocks=source)  # a right to pull them
        wire.hear()  # it has: the blocks are free again

        wire.send(sender.apply("receiver", wire.receive()))  # the receiver is about to shrink
        wire.send(sender.disconnect("receiver"))
        sender.acknowledge("receiver", wire.receive())
        wire.close()


def compute(sender: Endpoint, prompt: int, block_size: int) -> list[int]:
    """Stands for the model: leaves KV in the prompt's blocks, and returns them."""
    blocks = blocks_of_prompt(prompt, block_size)
    write_pattern(sender.views[0], blocks, seed=prompt)
    if sender.views[0][0].is_cuda:
        torch.cuda.synchronize(sender.views[0][0].device)
    return blocks


def push_prompt(sender: Endpoint, wire: Wire, prompt: int, block_size: int) -> None:
    blocks = compute(sender, prompt, block_size)
    granted = wire.hear()["blocks"]
    half = sender.geometry.num_layers // 2
    tickets = [
        sender.push("receiver", blocks, granted, layers=layers)  # as layers are computed
        for layers in (range(half), range(half, sender.geometry.num_layers))
    ]
    for ticket in tickets:
        ticket.wait(TIMEOUT_S)
        print(f"sender: pushed {ticket.num_bytes} bytes of prompt {prompt} by {ticket.lane}")
    wire.tell(pushed=prompt)


if __name__ == "__main__":
    try:
        main()
    except (KvxferError, OSError) as error:
        sys.exit(f"sender: error: {error}")
