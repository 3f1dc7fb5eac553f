"""`python -m tools.local_ray [WORDS ...]`: a Ray cluster of two workers of one core each, both here; a command on it.

Without words it is the study of the digits, `cumulant reproduce --on ray`. Only the cluster started here is ended.
"""

from __future__ import annotations

import os
import subprocess
import sys

DIGITS = ["reproduce", "--on", "ray", "--attention", "softmax", "cumulant3", "--seeds", "2", "--epochs", "5"]
DIGITS += ["--out", "runs/ray"]


def main(words: list[str]) -> int:
    from ray.cluster_utils import Cluster

    store = 100 << 20  # bytes: only records travel
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": store})
    try:
        cluster.add_node(num_cpus=1, object_store_memory=store)
        cluster.wait_for_nodes()
        command = [sys.executable, "-m", "cumulant.cli", *(words or DIGITS)]
        print(f"Ray at {cluster.address}, two workers: cumulant {' '.join(words or DIGITS)}", flush=True)
        return subprocess.run(command, env={**os.environ, "RAY_ADDRESS": cluster.address}).returncode
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
