"""The examples print the same losses from one process and from two that share the context."""

from importlib.util import find_spec
from pathlib import Path

import fresh
import pytest

FOLDER = Path(__file__).parents[2] / "examples"
# Forks one process that is alone and two that torchrun's variables bring together; each runs the example.
WORKER = """
import os, runpy, socket, sys
import torch.distributed, cumulant.data, cumulant.models
from torch.distributed.device_mesh import init_device_mesh
path, sys.path[0] = sys.argv[1], os.path.dirname(sys.argv[1])
with socket.socket() as any_port:
    any_port.bind(("127.0.0.1", 0))
    port = any_port.getsockname()[1]
place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
codes = []
for kinds in ([{}], [{**place, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]):
    print("processes", len(kinds), flush=True)
    children = []
    for kind in kinds:
        if not (pid := os.fork()):
            os.environ.update(kind)
            try:
                runpy.run_path(path, run_name="__main__")
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        children.append(pid)
    codes += [os.waitpid(pid, 0)[1] for pid in children]
sys.exit(bool(any(codes)))
"""


@pytest.mark.parametrize(
    ("name", "needs"), [("torch", "torch"), ("accelerate", "accelerate"), ("trainer", "accelerate")]
)
def test_two_processes_that_share_a_context_print_the_losses_of_one(name, needs, tmp_path):
    if find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    said = fresh.forked("-c", WORKER, str(FOLDER / f"split_{name}.py"), folder=tmp_path)
    alone, both = said.split("processes 2")
    losses = [
        [float(line.split()[-1]) for line in said.splitlines() if line.startswith("step")] for said in (alone, both)
    ]
    assert len(losses[0]) == 5
    assert losses[0][4] < losses[0][0] - 0.3
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
