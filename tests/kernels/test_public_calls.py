"""Every public function with its defaults on a GPU: a kernel, torch's fused softmax, or a word on the obstacle."""

from __future__ import annotations

import pytest
from gpu_public import CALLS, PRODUCTS, verdict
from kernel_checks import DEVICE  # noqa: F401  # before anything of `cumulant.kernels`


def test_what_has_no_kernel_is_a_call() -> None:
    assert all(any(name.startswith(begin) for name in CALLS) for begin in PRODUCTS)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(12))  # so that processes share them
def test_no_public_call_is_silently_slow(part: int) -> None:
    verdicts = {name: verdict(name) for name in list(CALLS)[part::12]}
    assert {name: found for name, found in verdicts.items() if found[0].isupper()} == {}
