"""What surrounds a step: the precision of products in float32."""

import pytest
import torch

from cumulant.train.stepping import quick_float32


@pytest.mark.parametrize(
    ("device", "precision", "during"),
    [("cuda", "bf16", "high"), ("cuda", "fp32", "highest"), ("cpu", "bf16", "highest")],
)
def test_only_a_gpu_that_trains_in_bfloat16_multiplies_float32_with_fewer_digits(device, precision, during):
    assert torch.get_float32_matmul_precision() == "highest"
    with quick_float32(torch.device(device), precision):
        assert torch.get_float32_matmul_precision() == during
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_failure_leaves_the_precision_as_it_was():
    with pytest.raises(RuntimeError, match="stop"), quick_float32(torch.device("cuda"), "bf16"):
        raise RuntimeError("stop")
    assert torch.get_float32_matmul_precision() == "highest"
