"""Events of one process, a JSON object a line."""

import json
import threading
import time

from kvxfer.telemetry.trace import Trace, now_ns, read_trace


def test_events_come_back_in_order_with_time_and_worker(tmp_path):
    path = tmp_path / "trace"
    before = time.monotonic_ns()
    trace = Trace("decode-0", path)
    trace.event("first", blocks=[1, 2])
    trace.event("second", at_ns=17, text="ä\n\u2028")
    trace.close()
    first, second = read_trace(path)
    assert before <= first["at_ns"] <= time.monotonic_ns()
    assert {**first, "at_ns": 0} == {
        "at_ns": 0,
        "worker": "decode-0",
        "event": "first",
        "blocks": [1, 2],
    }
    assert second == {"at_ns": 17, "worker": "decode-0", "event": "second", "text": "ä\n\u2028"}


def test_an_event_can_be_read_as_soon_as_it_is_flushed(tmp_path):
    path = tmp_path / "trace"
    trace = Trace("w", path)
    for count in range(1, 4):
        trace.event("e")
        assert len(read_trace(path)) == count - 1, "writing would hold up what it tells of"
        trace.flush()
        assert len(read_trace(path)) == count
    trace.close()


def test_a_trace_is_appended_to(tmp_path):
    path = tmp_path / "trace"
    for name in ("one", "two"):
        trace = Trace("w", path)
        trace.event(name)
        trace.close()
    assert [event["event"] for event in read_trace(path)] == ["one", "two"]


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "trace"
    whole = json.dumps({"event": "whole"}) + "\n"
    torn = json.dumps({"event": "torn"}) + "\n"
    for cut in range(1, len(torn)):
        path.write_text(whole + torn[:-cut])
        assert read_trace(path) == [{"event": "whole"}]
    path.write_text("")
    assert read_trace(path) == []


def test_no_file_is_no_events(tmp_path):
    assert read_trace(tmp_path / "absent") == []


def test_no_path_is_no_file_and_close_is_idempotent(tmp_path):
    trace = Trace("w", None)
    trace.event("nothing")
    trace.close()
    path = tmp_path / "trace"
    trace = Trace("w", path)
    trace.close()
    trace.close()
    trace.event("late")
    assert read_trace(path) == []


def test_lines_of_several_threads_do_not_mix(tmp_path):
    path = tmp_path / "trace"
    trace = Trace("w", path)

    def write(name):
        for index in range(200):
            trace.event(name, index=index, padding="x" * 300)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    trace.close()
    events = read_trace(path)
    for name in "abcd":
        assert [e["index"] for e in events if e["event"] == name] == list(range(200))


def test_now_is_the_monotonic_clock():
    assert time.monotonic_ns() - 10**9 < now_ns() <= time.monotonic_ns()
