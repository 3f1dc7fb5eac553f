"""A million tokens through `ClusterStream`: time per token, memory, and error against exact softmax.

    python benchmarks/cluster_stream.py             # table, and benchmarks/results/cluster_stream.json

One head of width 16, float32, one token at a time. Keys wander slowly (a topic that changes) with noise on top; the
queries look for the topic of the moment, so that both the recent past and the far past count. At the end of each tenth
the next 16 queries are compared with softmax over all tokens so far.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from tqdm import tqdm

from cumulant.bench.provenance import provenance
from cumulant.cluster import Blocks, ClusterStream


def tokens(length: int, width: int = 16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(1, 1, length, width, generator=generator)

    topic = draw()[..., : length // 1000 + 1, :].repeat_interleave(1000, -2)[..., :length, :]
    return 1.5 * topic + 0.5 * draw(), topic + 0.5 * draw(), topic + draw()


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q.double() @ k.double().mT * q.shape[-1] ** -0.5).softmax(-1) @ v.double()


def run(length: int, blocks: Blocks) -> list[dict[str, float]]:
    q, k, v = tokens(length + 16)
    stream, rows = ClusterStream(blocks), []
    tenth, start = length // 10, time.perf_counter()
    for t in tqdm(range(length), desc=str(blocks)):
        now = slice(t, t + 1)
        stream.step(q[..., now, :], k[..., now, :], v[..., now, :])
        if (t + 1) % tenth == 0:
            seconds = time.perf_counter() - start
            asked = q[..., t + 1 : t + 17, :]
            seen = k[..., : t + 1, :], v[..., : t + 1, :]
            truth = exact(asked, *seen)
            away = truth - seen[1].double().mean(-2, keepdim=True)
            error = (stream.apply(asked).double() - truth).norm() / away.norm()
            assert stream.state is not None
            held = sum(x.numel() for x in stream.state)
            rows.append(
                {
                    "tokens": t + 1,
                    "microseconds_per_token": 1e6 * seconds / tenth,
                    "numbers_held": held,
                    "clusters": stream.clusters,
                    "relative_error": error.item(),
                }
            )
            start = time.perf_counter()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1_000_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for blocks in (Blocks(64, keep=0), Blocks(64, keep=8, recent=1)):
        rows = run(arguments.length, blocks)
        results[str(blocks)] = rows
        print(blocks)
        print(f"{'tokens':>10} {'us/token':>9} {'numbers held':>13} {'clusters':>9} {'error':>7}")
        for row in rows:
            print(
                f"{row['tokens']:>10,} {row['microseconds_per_token']:9.0f} {row['numbers_held']:>13,} "
                f"{row['clusters']:>9} {row['relative_error']:7.3f}"
            )
    path = Path(__file__).parent / "results" / "cluster_stream.json"
    command = f"python benchmarks/cluster_stream.py --length {arguments.length}"
    path.write_text(json.dumps(provenance(command) | {"streams": results}, indent=1) + "\n")
    print(f"wrote benchmarks/results/{path.name}")


if __name__ == "__main__":
    main()
