"""How KV transfer fails for people who run it, by kind: a test named after each kind, on real
processes, and an index of what else proves that the failure is not possible here.

The index names tests by file and name; that each exists is a test, so that none is renamed away.
"""

from __future__ import annotations

import ast
import pickle
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from support.fork_server import ForkServer
from support.service import END_TIMEOUT_S, PEER_TIMEOUT_S, Service

TESTS = Path(__file__).parent.parent

INDEX: dict[str, tuple[str, ...]] = {
    "a reference that was reused": (
        "decode/test_wrong_push.py::test_a_grant_is_used_once",
        "decode/test_wrong_push.py::test_a_done_of_another_grant_is_not_ours",
        "prefill/test_refusals.py::test_a_grant_asked_for_twice_is_used_once",
    ),
    "blocks freed when a lease ended": (
        "prefill/test_refusals.py::test_a_lease_that_was_given_up_is_never_confirmed",
        "decode/test_wrong_pull.py::test_a_broken_lease_is_answered_with_failed_and_the_kv_is_dropped",
    ),
    "pages reused while a writer is in flight": (
        "prefill/test_refusals.py::test_taken_where_we_push_does_not_free_what_is_being_written",
        "cache/test_blocks.py::test_quarantined_blocks_come_back_only_when_released",
        "decode/test_wrong_push.py::test_quarantine_ends_with_the_answer_to_this_abort_only",
    ),
    "decode runs on incomplete KV": (
        "decode/test_wrong_push.py::test_a_done_that_covers_something_else_never_makes_kv_count",
        "decode/test_wrong_pull.py::test_confirmed_before_all_was_read_never_makes_kv_count",
    ),
    "a layout guessed from a shape": (
        "decode/test_hand_over.py::test_kv_arrives_bit_identical_whatever_the_layouts",
        "cache/test_layout.py::test_strides_of_a_peer_that_reckons_otherwise_are_refused",
    ),
    "an abort that is never answered": (
        "prefill/test_worker.py::test_an_abort_of_what_is_over_is_answered_too",
        "decode/test_wrong_push.py::test_an_abort_that_was_lost_is_sent_again_when_the_peer_is_back",
    ),
    "a client that cancels in the middle": (
        "decode/test_worker.py::test_cancel_in_every_state_leaves_nothing_behind",
    ),
    "rejected before admission": (
        "decode/test_worker.py::test_a_prompt_that_cannot_be_served_is_refused_in_one_answer",
    ),
    "notified under the wrong id": (
        "decode/test_wrong_pull.py::test_a_confirmation_under_another_lease_is_not_ours",
    ),
    "a post that fails": (
        "decode/test_worker.py::test_a_transport_that_refuses_fails_the_request_and_is_used_again",
        "worker/test_transfer_thread.py::test_a_move_that_cannot_be_ends_once_too",
    ),
    "in progress for ever when a peer stalls": (
        "connectors/test_nixl.py::test_a_stopped_peers_ticket_ends_only_when_its_bytes_are_at_rest",
        "decode/test_worker.py::test_a_deadline_that_passes_is_an_error_and_blocks_wait_in_quarantine",
    ),
    "a thread that dies": (
        "worker/test_work_thread.py::test_anything_else_ends_in_worker_died_with_a_clear_text",
    ),
    "a notification that is lost": ("faults/test_messages.py::test_messages_are",),
    "a peer that restarted": (
        "worker/test_peers.py::test_a_restarted_dialler_replaces_its_former_self",
        "worker/test_peers.py::test_a_restarted_listener_is_found_and_its_former_self_fenced",
        "contracts/test_connector.py::test_a_restarted_peer_takes_its_name_over",
        "faults/test_every_state.py::test_faults_at",
    ),
    "a peer that kept its descriptors": (
        "connectors/test_stale_peer.py::test_a_stale_peer_reads_and_writes_tombstones_and_the_owner_lives",
        "faults/test_stale_peers.py::test_a_late_writer_to_decode_reaches_quarantine_and_tombstones_only",
        "faults/test_stale_peers.py::test_a_worker_sleeps_and_wakes_under_a_stale_peer",
    ),
    "only the first chunk is registered": (
        "worker/test_transfer_thread.py::test_the_first_growth_registers_what_warm_up_committed_too",
        "transfer/test_plan_ends.py::test_data_across_the_edge_of_every_chunk",
    ),
    "unmapped and mapped again at the same address": (
        "memory/test_extensible_tensor.py::test_views_live_through_growth_release_and_recommit",
        "contracts/test_connector.py::test_revoked_regions_are_out_of_reach_until_announced_again",
    ),
    "an update that mixes in deregistrations": (
        "worker/test_transfer_thread.py::test_each_growth_tells_just_what_it_added",
        "worker/test_residency.py::test_memory_is_released_only_when_the_peer_has_let_go",
    ),
    "a commit that fails half-way": (
        "worker/test_transfer_thread.py::test_a_failed_registration_rolls_the_commit_back",
        "memory/test_host_driver.py::test_too_few_open_files_undo_the_whole_commit_and_say_what_to_do",
    ),
    "too many descriptors": (
        "transfer/test_plan_speed.py::test_a_hundred_thousand_descriptors_take_at_most_ten_milliseconds",
        "transfer/test_plan.py::test_consecutive_blocks_of_one_block_outermost_layout_are_one_run",
    ),
    "a first transfer that takes seconds": (
        "transfer/test_warming.py::test_new_regions_are_read_once_in_batches_one_at_a_time",
    ),
    "a lane that is slow": (
        "worker/test_lane_trials.py::test_both_use_the_lane_that_was_quickest_and_say_how_quick",
        "worker/test_lane_trials.py::test_a_lane_slower_than_asked_for_is_refused",
    ),
    "a mismatch found at transfer time": (
        "worker/test_handshake.py::test_who_does_not_fit_is_refused_by_name_and_the_listener_lives_on",
    ),
    "a malformed packet": (
        "control/test_channel.py::test_malformed_frames_are_dropped_and_counted",
        "control/test_channel.py::test_a_flood_of_nonsense_does_not_fill_the_log_or_stop_others",
    ),
    "an open port": ("control/test_channel.py::test_what_is_not_loopback_is_refused",),
}


@pytest.mark.parametrize("report", INDEX)
def test_there_is_a_test_of(report: str) -> None:
    for name in INDEX[report]:
        path, _, function = name.partition("::")
        tree = ast.parse((TESTS / path).read_text())
        found = {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
        assert function in found, f"{name} is gone"


@pytest.fixture(scope="module", params=["push", pytest.param("pull", marks=pytest.mark.slow)])
def shared(request: pytest.FixtureRequest, fork_server: ForkServer) -> Iterator[Service]:
    with Service(fork_server, lane=request.param, connector="peer,nixl") as service:
        yield service


def test_wrong_tokens_with_http_200(shared: Service) -> None:
    """Blocks are reused at once, by prompts that begin alike, while others are given up."""
    draw = random.Random(1)
    for _ in range(4):
        for index in range(10):
            asked = shared.ask(draw.choice((9, 20, 33)), draw.randrange(1, 6))
            if index % 3 == 2:
                shared.listen(draw.uniform(0, 0.02))
                shared.cancel(asked)
        assert any(one.is_served for one in shared.collect())
    shared.check_idle()


def test_blocks_leaked_or_stranded(shared: Service) -> None:
    """All cancelled, all refused, and a router that dies: nothing is held a moment later."""
    for _ in range(6):
        shared.cancel(shared.ask(40, 50))
    shared.ask(1000, 1)
    found = shared.collect()
    assert [one.reason for one in found[:6]] == ["cancelled"] * 6
    assert "holds" in found[6].error
    for _ in range(6):
        shared.ask(40, 50)
    shared.listen(0.02)
    shared.finish("router", signal.SIGKILL)
    shared["router"].start()
    shared.collect()
    shared.recover()
    shared.check_idle()


def test_hangs(shared: Service) -> None:
    """A prefill worker that stalls for good: all requests end while it still stands."""
    for _ in range(4):
        shared.ask(40)
    shared.listen(0.015)
    shared["prefill"].send(signal.SIGSTOP)
    began = time.monotonic()
    shared.ask(40)  # with nobody to prefill it
    found = shared.collect()
    assert time.monotonic() - began < END_TIMEOUT_S
    assert found[-1].reason == "error"
    shared["prefill"].send(signal.SIGCONT)
    shared.recover()
    shared.check_idle()


def test_peers_that_restart(shared: Service) -> None:
    """Again and again, in any order, both at once: never a restart of anybody else."""
    draw = random.Random(2)
    starts = shared["router"].starts
    for roles in (["prefill"], ["decode"], ["decode", "prefill"], ["prefill", "decode"]):
        for _ in range(2):
            shared.ask(28)
        shared.listen(draw.uniform(0, 0.03))
        for role in roles:
            shared.finish(role, signal.SIGKILL)
        for role in reversed(roles):
            shared[role].start()
        shared.collect()
        shared.recover()
    assert shared["router"].starts == starts
    shared.check_idle()


def test_growable_memory(fork_server: ForkServer) -> None:
    """The cache grows while KV moves in it, at both ends."""
    options = {"kv_commit": "elastic", "kv_initial_blocks": 8}
    with Service(fork_server, lane="auto", connector="peer,nixl", **options) as service:
        before = {role: service.status(role) for role in ("prefill", "decode")}
        for _ in range(8):
            service.ask(40, 20)
        assert all(one.is_served for one in service.collect())
        for role, values in before.items():
            now = service.status(role)
            assert now["generation"] > values["generation"], "it grew"
            assert now["base_address"] == values["base_address"]
            assert now["registered_bytes"] == now["committed_bytes"] > values["committed_bytes"]


def test_slow_in_silence(shared: Service) -> None:
    """Which lane, and how quick it was when tried, can be asked for."""
    values = shared.status("decode")
    assert values["lane prefill-0"].split("/")[1] == shared.name.split("-")[0]
    assert values["lane_gbps prefill-0"] > 0


def test_handshake_and_configuration(fork_server: ForkServer) -> None:
    """A worker that does not fit ends with the field's name; the one that it dialled lives on."""
    with Service(fork_server, lane="push", connector="nixl") as service:
        decode = service["decode"]
        service.finish("decode", signal.SIGKILL)
        options = decode.order["options"]
        decode.order["options"] = {**options, "lane": "pull"}
        decode.launch()
        assert decode.wait(10.0) != 0
        assert "lane" in decode.tail().splitlines()[-1]
        for listen in ("tcp://0.0.0.0:0", "tcp://*:0"):
            decode.order["options"] = {**options, "listen": listen}
            decode.launch()
            assert decode.wait(10.0) != 0
            assert "listen" in decode.tail().splitlines()[-1]
        decode.order["options"] = options
        decode.start()
        service.recover()


def test_security(shared: Service, tmp_path: Path) -> None:
    """What would run code if it were unpickled, and noise: dropped, and service goes on."""
    trap = tmp_path / "ran"
    evil = pickle.dumps(_Trap(str(trap)))
    draw = random.Random(3)
    context, sockets = zmq.Context(), []
    try:
        for role in ("prefill", "decode"):
            socket = context.socket(zmq.DEALER)
            sockets.append(socket)
            socket.connect(shared.addresses[role])
            for index in range(200):
                socket.send_multipart(
                    [evil] if index % 2 else [draw.randbytes(64)] * (1 + index % 3)
                )
        assert shared.recover() < PEER_TIMEOUT_S * 4
    finally:
        for socket in sockets:
            socket.close(linger=0)
        context.term()
    assert not trap.exists()
    shared.check_idle()


class _Trap:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self._path, "w")
