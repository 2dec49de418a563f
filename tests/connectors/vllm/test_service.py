"""Two engines' ranks hand KV over, without vLLM: every byte, and every end."""

from __future__ import annotations

import time

import pytest
import torch
from support.keys import KeyRing
from support.vllm_ranks import Rank, claim, load, offer, running, source_of

from connectors.vllm.handover import Claim as Claimed
from connectors.vllm.handover import Load, Offer, RankAddress, Source, Step
from connectors.vllm.messages import (
    CODEC,
    WIRE_VERSION,
    Claim,
    Confirmed,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Ready,
    Taken,
    Unknown,
    Welcome,
)
from connectors.vllm.service import Outcome
from connectors.vllm.worker import Worker
from kvxfer.control.channel import Channel


class Visitor:
    """A consumer's rank by hand."""

    def __init__(self, rank: Rank) -> None:
        self.channel = Channel("visitor", codec=CODEC)
        self.facts = Rank("V").facts
        self.key = self.channel.dial(rank.address.address)
        self.heard: list[Message] = []

    def say(self, message: Message) -> None:
        deadline_s = time.monotonic() + 5
        while True:
            try:
                self.channel.send(self.key, message)
                return
            except Exception:
                assert time.monotonic() < deadline_s
                time.sleep(0.005)

    def hear(self, kind: type) -> Message:
        deadline_s = time.monotonic() + 10
        while True:
            self.heard += [letter.message for letter in self.channel.poll(0.01)]
            for message in self.heard:
                if isinstance(message, kind):
                    self.heard.remove(message)
                    return message
            assert time.monotonic() < deadline_s, f"no {kind.__name__}, but {self.heard}"

    def leave(self) -> None:
        self.say(Goodbye(b""))
        self.channel.close()

    def greet(self) -> None:
        self.say(Hello(WIRE_VERSION, self.facts))
        self.hear(Welcome)


@pytest.fixture
def pair():
    producer, consumer = Rank("P"), Rank("D")
    producer.fill()
    with running(producer, consumer):
        yield producer, consumer


@pytest.mark.parametrize(
    ("ours", "theirs", "sizes", "form"),
    [
        ("LBHNC", "LBHNC", (16, 16), "halves"),
        ("LBNHC", "BLNHC", (16, 16), "tokens"),
        ("BLHNC", "LBHNC", (32, 16), "tokens"),
        ("BHLNC", "LHBNC", (16, 32), "tokens"),
    ],
)
@pytest.mark.parametrize("count", [5, 70])
def test_a_prompts_kv_arrives_whatever_the_layouts_and_block_sizes(
    ours: str, theirs: str, sizes: tuple[int, int], form: str, count: int
):
    producer = Rank("P", layout=ours, size=sizes[0], form=form)
    consumer = Rank("D", layout=theirs, size=sizes[1], form=form)
    producer.fill()
    src, dst = [7, 3, 11, 2, 9][: -(-count // sizes[0])], [4, 8, 1, 6, 10][: -(-count // sizes[1])]
    with running(producer, consumer):
        offer([producer], src, count)
        claim([consumer], source_of([producer]))
        load([consumer], dst, 0, count)
        assert not consumer.loaded().failed
        producer.sent()
        assert torch.equal(
            producer.tokens(src, count, producer.held), consumer.tokens(dst, count, consumer.held)
        )
        others = [block for block in range(24) if block not in dst]
        assert not any(layer[others].any() for layer in consumer.tensors)
        stats = consumer.service.stats.take()
        assert stats and len(stats["bytes_transferred"]) == 1
        assert stats["num_descriptors"][0] >= 1 and stats["num_failed_transfers"] == []


@pytest.mark.parametrize(
    ("producers", "consumers", "heads"), [(1, 2, 4), (2, 1, 4), (4, 1, 2), (2, 4, 2)]
)
def test_tensor_parallel_sizes_may_differ(producers: int, consumers: int, heads: int):
    ps = [Rank("P", rank=index, ranks=producers, heads=heads) for index in range(producers)]
    ds = [Rank("D", rank=index, ranks=consumers, heads=heads) for index in range(consumers)]
    for producer in ps:
        producer.fill()
    with running(*ps, *ds):
        offer(ps, [5, 6], 20)
        claim(ds, source_of(ps))
        load(ds, [8, 2], 0, 20)
        for consumer in ds:
            assert not consumer.loaded().failed
            for head in consumer.held:
                one = range(head, head + 1)
                source = next(producer for producer in ps if head in producer.held)
                assert torch.equal(source.tokens([5, 6], 20, one), consumer.tokens([8, 2], 20, one))
        for producer in ps:
            producer.sent()  # those whose heads nobody read, too


def test_what_the_consumer_has_already_is_not_touched(pair):
    producer, consumer = pair
    offer([producer], [1, 2, 3], 40)
    claim([consumer], source_of([producer]))
    load([consumer], [4, 5, 6], 16, 40)
    assert not consumer.loaded().failed
    assert not any(layer[4].any() for layer in consumer.tensors)
    ours, theirs = consumer.tokens([5, 6], 24, range(4)), producer.tokens([2, 3], 24, range(4))
    assert torch.equal(ours, theirs)


def test_a_claim_may_come_before_the_offer(pair):
    producer, consumer = pair
    claim([consumer], source_of([producer]))
    load([consumer], [4], 0, 9)
    time.sleep(0.1)
    offer([producer], [1], 9)
    assert not consumer.loaded().failed
    producer.sent()


def test_kv_is_good_once(pair):
    producer, consumer = pair
    offer([producer], [1], 9)
    claim([consumer], source_of([producer]))
    load([consumer], [4], 0, 9)
    consumer.loaded()
    producer.sent()
    visitor = Visitor(producer)
    visitor.greet()
    visitor.say(Taken("lease"))
    assert isinstance(visitor.hear(Failed), Failed)
    visitor.leave()


def test_one_lease_serves_one_request(pair):
    producer, consumer = pair
    claim([consumer], source_of([producer]))
    again = Step(
        claims=[Claimed("again", source_of([producer]))], loads=[Load("again", 0, 9, ([7],))]
    )
    consumer.service.tell(again)
    assert "for request d already" in consumer.loaded("again").failed["again"]
    offer([producer], [1], 9)
    load([consumer], [4], 0, 9)
    assert not consumer.loaded().failed


def test_a_load_without_a_claim_fails(pair):
    _, consumer = pair
    load([consumer], [4], 0, 9)
    assert "never claimed" in consumer.loaded().failed["d"]


def test_without_a_service_loads_fail_and_offers_end():
    worker = Worker(lambda tensors: pytest.fail("nothing was registered"))
    worker.tell(Step(offers=[Offer("p", "l", 9, ([1],))], loads=[Load("d", 0, 9, ([4, 5],))]))
    outcome = worker.take()
    assert outcome.sent == {"p"} and outcome.loaded == {"d"} and outcome.invalid_blocks == {4, 5}
    assert worker.take() == Outcome()
    worker.release()


def test_a_request_that_ends_before_it_has_blocks_frees_the_producers(pair):
    producer, consumer = pair
    offer([producer], [1], 9)
    claim([consumer], source_of([producer]))
    consumer.service.tell(Step(drops=["d"]))
    producer.sent()
    assert not consumer.service.take().loaded


def test_an_abort_while_it_loads_is_told_once(pair):
    producer, consumer = pair
    claim([consumer], source_of([producer]))
    load([consumer], [4], 0, 9)
    consumer.service.tell(Step(drops=["d"]))
    outcome = consumer.loaded()
    assert "ended" in outcome.failed["d"] and outcome.invalid_blocks == {4}
    offer([producer], [1], 9)
    producer.sent()


def test_a_prompt_that_the_producer_has_not_whole_is_not_used(pair):
    producer, consumer = pair
    offer([producer], [1], 9)
    claim([consumer], source_of([producer]))
    load([consumer], [4], 0, 10)
    assert "10 are wanted" in consumer.loaded().failed["d"]
    producer.sent()


def test_a_silent_consumer_loses_its_lease_and_is_never_confirmed():
    producer = Rank("P", peer_timeout_s=0.3)
    with running(producer):
        offer([producer], [1], 9)
        visitor = Visitor(producer)
        visitor.greet()
        visitor.say(Claim("lease", 1))
        assert visitor.hear(Ready).blocks == [[1]]
        producer.sent()  # it was silent for too long
        visitor.say(Taken("lease"))
        visitor.hear(Unknown)
        visitor.greet()
        visitor.say(Taken("lease"))
        assert visitor.hear(Failed).reason == "the lease was broken"
        assert not any(isinstance(message, Confirmed) for message in visitor.heard)
        visitor.leave()


def test_a_reader_that_lives_keeps_its_lease_for_longer_than_anybody_may_claim_it():
    producer = Rank("P", peer_timeout_s=0.6, lease_timeout_s=0.1)
    with running(producer):
        offer([producer], [1], 9)
        visitor = Visitor(producer)
        visitor.greet()
        visitor.say(Claim("lease", 1))
        visitor.hear(Ready)
        for _ in range(10):
            visitor.say(Heartbeat())
            time.sleep(0.1)
        assert not producer.service.take().sent
        visitor.say(Taken("lease"))
        visitor.hear(Confirmed)
        producer.sent()
        visitor.leave()


def test_kv_that_nobody_claims_is_freed():
    producer = Rank("P", lease_timeout_s=0.1)
    with running(producer):
        offer([producer], [1], 9)
        producer.sent()


def test_a_producer_that_leaves_fails_what_was_claimed_and_waits_for_goodbyes(pair):
    producer, consumer = pair
    offer([producer], [1], 9)
    claim([consumer], source_of([producer]))
    load([consumer], [4], 0, 9)
    consumer.loaded()
    claim([consumer], source_of([producer], "next"))
    producer.service.stop()
    assert not producer.service.silent
    load([consumer], [4, 5], 16, 20)
    outcome = consumer.until(lambda outcome: bool(outcome.failed))
    assert outcome.invalid_blocks == {5}


def test_who_was_silent_may_still_read():
    producer = Rank("P", peer_timeout_s=0.2)
    with running(producer):
        visitor = Visitor(producer)
        visitor.greet()
        producer.service.stop()
        assert producer.service.silent == {visitor.facts.name}
        visitor.channel.close()


def test_a_producer_that_nobody_finds_fails_the_load():
    consumer = Rank("D", claim_timeout_s=0.3)
    with running(consumer):
        nobody = RankAddress("tcp://127.0.0.1:9", "life")
        claim([consumer], Source("P", "p", "lease", (nobody,)))
        load([consumer], [4], 0, 9)
        assert "no answer" in consumer.loaded().failed["d"]


def test_a_producer_of_another_life_is_not_asked(pair):
    producer, consumer = pair
    old = RankAddress(producer.address.address, "an earlier life")
    claim([consumer], Source("P", "p", "lease", (old,)))
    load([consumer], [4], 0, 9)
    assert "started anew" in consumer.loaded().failed["d"]


def test_addresses_of_other_hosts_are_not_dialled_without_keys(pair):
    _, consumer = pair
    claim([consumer], Source("P", "p", "lease", (RankAddress("tcp://10.1.2.3:4", "life"),)))
    load([consumer], [4], 0, 9)
    assert "without keys" in consumer.loaded().failed["d"]


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"model": "another"}, "model"),
        ({"form": "halves"}, "page_format"),
        ({"size": 24}, "block_size"),
        ({"heads": 2}, "total_heads"),
    ],
)
def test_engines_that_differ_are_told_in_what(other: dict, field: str):
    producer, consumer = Rank("P", **other), Rank("D")
    with running(producer, consumer):
        claim([consumer], source_of([producer]))
        load([consumer], [4], 0, 9)
        assert f"{field} differs" in consumer.loaded().failed["d"]


def test_keys_let_in_those_who_are_listed_and_nobody_else(tmp_path):
    ring = KeyRing(tmp_path)
    keys = [str(ring.make("p")), str(ring.make("d")), str(ring.make("x", allow=False))]
    with_keys = [{"key_file": key, "peer_keys": str(ring.allowed)} for key in keys]
    producer, consumer = Rank("P", **with_keys[0]), Rank("D", **with_keys[1])
    stranger = Rank("X", claim_timeout_s=0.5, **with_keys[2])
    producer.fill()
    with running(producer, consumer, stranger):
        assert producer.address.address.endswith("#p")
        offer([producer], [1], 9)
        claim([stranger], source_of([producer]))
        load([stranger], [4], 0, 9)
        assert "no answer" in stranger.loaded().failed["d"]
        claim([consumer], source_of([producer]))
        load([consumer], [4], 0, 9)
        assert not consumer.loaded().failed
        assert torch.equal(producer.tokens([1], 9, range(4)), consumer.tokens([4], 9, range(4)))
