"""What is timed beside others is timed behind each of them alike."""

from collections import Counter
from itertools import pairwise

import pytest

from ioattn.bench.timer import balanced_orders


@pytest.mark.parametrize("count", range(1, 9))
def test_each_comes_behind_each_other_equally_often(count):
    orders = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    times = Counter(pair for order in orders for pair in pairwise(order))
    assert len(times) == count * (count - 1)
    assert len(set(times.values())) <= 1
