"""A million tokens through `ClusterStream`: time per token, memory, and error against exact softmax.

    python benchmarks/cluster_stream.py             # about 10 minutes on one core; results/cluster_stream.json
    python benchmarks/cluster_stream.py --quick     # 20,000 tokens, seconds; writes nothing

One head of width 16, float32. Tokens are appended in blocks; at the end of each tenth 128 of them go through one by one
and are timed, and the next 64 queries are compared with softmax over all tokens so far in float64. Three streams:

drift    natural: keys, queries and values follow one state that moves on four time scales at once (30 to a million
         tokens), plus noise. What was similar lately is similar now, and the far past returns. Queries weigh thousands
         of tokens.
sharp    the same state, queries twice as long: they weigh some ten times fewer tokens.
needles  adversarial: keys and values are noise, nothing in a block has to do with its neighbours, and each query asks
         for one single token, drawn from all of the past. Only what is still kept token by token can be found.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from cumulant.bench.provenance import provenance
from cumulant.cluster import Blocks, ClusterStream

WIDTH, ASKED, STEPS = 16, 64, 128
SCALES = (30, 1_000, 30_000, 1_000_000)
SETTINGS = (Blocks(64, keep=8, recent=1), Blocks(64, keep=32, recent=7), Blocks(64, keep=128, recent=15))
STREAMS = ("drift", "sharp", "needles")


def wandering(length: int, scale: int, generator: torch.Generator) -> Tensor:
    """x_t = a x_{t-1} + noise with a = 1 - 1/scale and variance 1, (length, WIDTH), in chunks of 1,000."""
    chunk, a = 1_000, 1 - 1 / scale
    noise = torch.randn(length, WIDTH, generator=generator, dtype=torch.float64) * math.sqrt(1 - a * a)
    powers = torch.tensor(a, dtype=torch.float64) ** torch.arange(chunk + 1)
    ago = torch.arange(chunk)[:, None] - torch.arange(chunk)
    within = powers[ago.clamp(min=0)].tril()
    last, parts = torch.randn(WIDTH, generator=generator, dtype=torch.float64), []
    for piece in noise.split(chunk):
        n = len(piece)
        parts.append(within[:n, :n] @ piece + powers[1 : n + 1, None] * last)
        last = parts[-1][-1]
    return torch.cat(parts).float()


def tokens(name: str, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (1, 1, length, WIDTH)."""
    generator = torch.Generator().manual_seed(0)
    state = torch.stack([wandering(length, scale, generator) for scale in SCALES]).sum(0) / len(SCALES) ** 0.5

    def noise(size: float) -> Tensor:
        return size * torch.randn(length, WIDTH, generator=generator)

    turn = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    k, v = state + noise(0.3), state @ turn + noise(0.5)
    q = (3.0 if name == "sharp" else 1.5) * (state + noise(0.3))
    if name == "needles":
        # Query t looks along one past key, long enough that no other token comes near it.
        past = (torch.rand(length, generator=generator) * torch.arange(length)).long()
        k, v = torch.nn.functional.normalize(noise(1.0), dim=-1) * WIDTH**0.5, noise(1.0)
        q = 8 * k[past]
    return tuple(x[None, None] for x in (q, k, v))  # type: ignore[return-value]


def error(stream: ClusterStream, q: Tensor, k: Tensor, v: Tensor) -> tuple[float, float]:
    """Relative error of the stream on queries q over keys and values so far, and how many tokens the queries weigh."""
    weights = (q.double() @ k.double().mT * WIDTH**-0.5).softmax(-1)
    truth = weights @ v.double()
    away = truth - v.double().mean(-2, keepdim=True)
    found = ((stream.apply(q).double() - truth).norm() / away.norm()).item()
    entropy = -(weights.clamp(min=1e-300).log() * weights).sum(-1)
    return found, entropy.exp().median().item()


def run(name: str, length: int, blocks: Blocks) -> list[dict[str, float]]:
    q, k, v = tokens(name, length + ASKED)
    stream, rows, tenth = ClusterStream(blocks), [], length // 10
    for end in range(tenth, length + 1, tenth):
        start, first = time.perf_counter(), end - tenth
        stream.append(k[..., first : end - STEPS, :], v[..., first : end - STEPS, :])
        appended = time.perf_counter() - start
        singles = []
        for t in range(end - STEPS, end):
            now = slice(t, t + 1)
            start = time.perf_counter()
            stream.step(q[..., now, :], k[..., now, :], v[..., now, :])
            singles.append(time.perf_counter() - start)
        assert stream.state is not None
        assert stream.length == end
        found, weighed = error(stream, q[..., end : end + ASKED, :], k[..., :end, :], v[..., :end, :])
        rows.append({
            "tokens": end, "append_us": 1e6 * appended / (tenth - STEPS),
            "step_us": 1e6 * sorted(singles)[STEPS // 2], "numbers_held": sum(x.numel() for x in stream.state),
            "clusters": stream.clusters, "relative_error": found, "tokens_weighed": weighed,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="20,000 tokens; nothing is written")
    parser.add_argument("--streams", nargs="+", default=STREAMS, choices=STREAMS, help="others stay as they are")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    length = 20_000 if arguments.quick else arguments.length
    path = Path(__file__).parent / "results" / "cluster_stream.json"
    before = json.loads(path.read_text())["streams"] if path.exists() and tuple(arguments.streams) != STREAMS else {}
    results = provenance(f"python benchmarks/cluster_stream.py --length {length}") | {"streams": before}
    for name in arguments.streams:
        results["streams"][name] = {}
        for blocks in SETTINGS:
            rows = run(name, length, blocks)
            results["streams"][name][f"keep {blocks.keep}, recent {blocks.recent}"] = rows
            print(f"\n{name}: blocks of {blocks.size}, keep {blocks.keep}, recent {blocks.recent}")
            print(
                f"{'tokens':>10} {'append us':>10} {'step us':>9} {'numbers':>9} {'clusters':>9} {'error':>7} weighed"
            )
            for row in rows:
                print(
                    f"{row['tokens']:>10,} {row['append_us']:10.1f} {row['step_us']:9.0f} {row['numbers_held']:>9,} "
                    f"{row['clusters']:>9} {row['relative_error']:7.3f} {row['tokens_weighed']:7,.0f}",
                    flush=True,
                )
            if not arguments.quick:
                path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
