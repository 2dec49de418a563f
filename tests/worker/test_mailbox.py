"""The queue that wakes a poll."""

import os
import select
import threading
import time

import pytest

from kvxfer.worker.mailbox import Mailbox


@pytest.fixture
def mailbox():
    box = Mailbox()
    yield box
    box.close()


def is_readable(mailbox, timeout_s=0.0):
    return bool(select.select([mailbox.fileno()], [], [], timeout_s)[0])


def test_items_come_out_in_order_and_once(mailbox):
    for item in range(100):
        mailbox.put(item)
    assert mailbox.drain() == list(range(100))
    assert mailbox.drain() == []


def test_it_is_readable_exactly_while_something_waits(mailbox):
    assert not is_readable(mailbox)
    mailbox.put("a")
    mailbox.put("b")
    assert is_readable(mailbox)
    mailbox.drain()
    assert not is_readable(mailbox)


def test_a_put_of_another_thread_wakes_who_waits(mailbox):
    thread = threading.Timer(0.05, mailbox.put, ["late"])
    thread.start()
    started = time.monotonic()
    assert is_readable(mailbox, 10.0)
    assert time.monotonic() - started < 5.0
    assert mailbox.drain() == ["late"]
    thread.join(5.0)


def test_nothing_is_lost_or_reordered_between_many_threads_and_one_drain(mailbox):
    each, threads = 400, 4

    def work(name):
        for index in range(each):
            mailbox.put((name, index))

    writers = [threading.Thread(target=work, args=(name,)) for name in range(threads)]
    for writer in writers:
        writer.start()
    found, deadline = [], time.monotonic() + 20
    while len(found) < each * threads:
        assert time.monotonic() < deadline
        assert is_readable(mailbox, 5.0), "something was put, and nothing woke us"
        found += mailbox.drain()
    for writer in writers:
        writer.join(5.0)
    for name in range(threads):
        assert [index for who, index in found if who == name] == list(range(each))
    assert not is_readable(mailbox)


def test_the_descriptor_goes_with_close():
    box = Mailbox()
    fd = box.fileno()
    assert not os.get_inheritable(fd)
    box.close()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_put_after_the_end_is_dropped_and_touches_no_descriptor():
    box = Mailbox()
    number = box.fileno()
    reader, writer = os.pipe()
    box.close()
    try:
        os.dup2(writer, number)  # the number is somebody else's now
        box.put("late")
        assert not select.select([reader], [], [], 0.05)[0]
        box.close()
        os.write(number, b"still open")
    finally:
        for one in (reader, writer, number):
            os.close(one)
