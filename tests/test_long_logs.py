"""Reading a log takes time in proportion to its length, whatever is in it."""

import pytest

from jax_vmem_guard.diagnosis import find_in_log
from jax_vmem_guard.shorten import shorten_paths

ON_STACK = "Ran out of memory in memory space vmem while allocating on stack for "
TABLE = "Ran out of memory in memory space vmem. Used 3.00M of 4.00M vmem. "


@pytest.mark.parametrize("start, repeated", [
    (f"{ON_STACK}%a = ", "("),
    (f"{ON_STACK}%a = f32[8] custom-call(), kernel_metadata={{", 'op_name="'),
    ("Too many buffers are colored in the alternate memory ", "for colored operand "),
    ("", "Allocation (size=3) would exceed memory (size=4) tag = '"),
    (TABLE, "1. Size: 3.00M XLA label: "),
    (f"{TABLE}1. Size: 3.00M\n", "XLA label: \n \n \n"),
    ("", "\\"),
    ("", "[type.googleapis.com/"),
    ("", "1. Size: 1"),
])
def test_repeated_fragments_end(start, repeated):
    """Each of these, at a million characters, took minutes with a careless pattern; a hang fails the suite."""
    find_in_log(start + repeated * (1_000_000 // len(repeated)))


def test_shortening_paths_ends():
    """Likewise for paths."""
    assert shorten_paths("/a" * 100_000) == "a"
