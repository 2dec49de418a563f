"""What a path can give at best, of one pair of devices and of several beside each other."""

import pytest

from kvxfer.transfer.ceilings import ceiling_between, measure_memcpy

H200 = "NVIDIA H200"


def memcpy(num_threads):
    return 10.0 + num_threads


@pytest.mark.parametrize(
    ("ours", "theirs", "paths", "gbps", "source"),
    [
        ("", "", 1, 11.0, "one thread's memcpy here"),
        ("", "", 2, 12.0, "2 threads' memcpy here"),
        (f"{H200} a", f"{H200} b", 1, 396.0, "known of this GPU, nvlink"),
        (f"{H200} a", f"{H200} b", 2, 792.0, "2 × known of this GPU, nvlink"),
    ],
)
def test_paths_beside_each_other_add_up_where_that_is_known(ours, theirs, paths, gbps, source):
    found = ceiling_between(ours, theirs, True, memcpy, paths)
    assert found is not None
    assert (found.gbps, found.source) == (gbps, source)
    assert ceiling_between(ours, theirs, False, memcpy, paths) is None


def test_memcpy_of_two_threads_is_measured_as_a_whole():
    """Not twice the buffers in the time of one, nor half as many."""
    one, two = measure_memcpy(), measure_memcpy(2)
    assert 0.2 * one < two < 5 * one
