"""Records of training runs as `cumulant bench train` keeps them, made up for tests of what is said about them."""

COSTS = {"parameters": 100, "flops": 2_000_000, "throughput": 50.0, "step_bytes": 1 << 20}


def record(variant, top1, seed=0, role="compared", failure=""):
    return {"variant": variant, "seed": seed, "role": role, "failure": failure, "top1": top1, **COSTS}


def baseline(*top1):
    first, *again = top1
    return [record("softmax", first), *(record("softmax", x, i + 1, "control") for i, x in enumerate(again))]
