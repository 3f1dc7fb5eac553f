"""A decoding process that is killed is told for what it is, with what to do."""

import os
import signal

import pytest
import torch
from torch.utils.data import get_worker_info

from cumulant.data import DataError, Loader, TensorImages
from cumulant.data.jobs import telling_of_killed_workers


class KillsItsReader(TensorImages):
    """Images of which the third kills a process that decodes beside the main one, as the kernel does without memory."""

    def decode(self, index, size, seed=None):
        if index == 2 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().decode(index, size, seed)


def deadly(count=8):
    return KillsItsReader(torch.zeros(count, 3, 4, 4, dtype=torch.uint8), torch.zeros(count, dtype=torch.int64))


def streamed(workers):
    loader = Loader(deadly(), 4, size=4, shuffle=False, in_memory=False, workers=workers)
    return [len(pixels) for pixels, _, _ in loader.epoch(0)]


KILLED = r"a process that decodes the data was killed: probably because .* out of memory; take fewer .* workers"


def test_a_killed_worker_is_told_where_batches_are_taken():
    with pytest.raises(DataError, match=KILLED):
        streamed(workers=2)


def test_a_killed_worker_is_told_while_the_memory_is_filled():
    with pytest.raises(DataError, match=KILLED):
        Loader(deadly(), 4, size=2, in_memory=True, workers=1)


def test_the_advice_helps():
    assert streamed(workers=0) == [4, 4]


def test_shared_memory_that_is_full_is_told_apart():
    said = "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory."  # noqa: E501
    with pytest.raises(DataError, match="/dev/shm"), telling_of_killed_workers():
        raise RuntimeError(said)


@pytest.mark.parametrize(
    "said",
    ["shapes differ", "DataLoader worker (pid 7) is killed by signal: Segmentation fault."],
    ids=["own", "crash"],
)
def test_other_errors_are_left_as_they_are(said):
    with pytest.raises(RuntimeError) as caught, telling_of_killed_workers():
        raise RuntimeError(said)
    assert str(caught.value) == said
