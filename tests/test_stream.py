import pytest
import torch
from oracles import relative

from cumulant import attention
from cumulant.kernels import launch
from cumulant.streaming import Stream


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(("order", "full"), [(1, False), (2, False), (3, False), (3, True)])
@pytest.mark.parametrize(("D", "E", "groups"), [(8, 8, 1), (20, 24, 3)])
def test_decoding_step_by_step_gives_the_causal_rows(order, full, D, E, groups, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(launch, "available", lambda x: False)
    elif not launch.INTERPRET:
        pytest.skip("the kernel runs on the CPU through the interpreter")
    q, k, v = torch.randn(2, 2 * groups, 30, D), torch.randn(2, 2, 30, D) + 5, torch.randn(2, 2, 30, E)
    rows = attention(
        q.double(), k.double(), v.double(), order=order, full=full, is_causal=True, enable_gqa=True, scale=0.3
    )
    prompted, fresh = Stream(order=order, full=full), Stream(order=order, full=full)
    prompted.append(k[:, :, :10], v[:, :, :10])
    for t in range(30):
        token = q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1]
        assert relative(fresh.step(*token, scale=0.3), rows[:, :, t : t + 1]) < 1e-5
        if t >= 10:
            assert relative(prompted.step(*token, scale=0.3), rows[:, :, t : t + 1]) < 1e-5


def test_a_step_of_more_than_one_token_is_refused():
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="one token"):
        Stream().step(x, x, x)
    one = torch.randn(1, 2, 1, 4)
    with pytest.raises(ValueError, match=r"query heads \(3\) must be a multiple of key heads \(2\)"):
        Stream().step(torch.randn(1, 3, 1, 4), one, one)
