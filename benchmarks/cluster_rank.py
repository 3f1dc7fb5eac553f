"""How a block of queries chooses its near clusters: error of each `rank` on the activations of a pretrained encoder.

    python benchmarks/cluster_rank.py --model MODEL --reviews imdb/test-00000-of-00001.parquet

Model, reviews and error are those of cluster_error.py: two texts of 4,096 tokens, one response for all; 64 blocks with
near fields for 128 and for 64 queries in a row, and 64 k-means clusters for 64 that are alike. Prints a
table by layer, mean over the texts; JSON goes to
benchmarks/results/cluster_rank.json. About a minute of one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch.nn.functional as F
from cluster_error import MEASURED_ON, error, opened

from cumulant.bench.provenance import provenance
from cumulant.cluster import KMeans, cluster_attention

RANKS = ("mass", "error", "mean")
# clusters, queries that share a near field, and its clusters
CASES = ((64, 128, 2), (64, 128, 4), (64, 64, 2), (64, 64, 4), (KMeans(64), 64, 2), (KMeans(64), 64, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with model.safetensors and tokenizer.json")
    parser.add_argument("--reviews", type=Path, required=True, help="parquet file with a column `text`")
    encoder, reviews = opened(parser.parse_args())
    texts = [encoder.long_text(iter(reviews[first:])) for first in MEASURED_ON]
    exact = [[F.scaled_dot_product_attention(*layer) for layer in text] for text in texts]
    results = provenance("python benchmarks/cluster_rank.py --model MODEL --reviews REVIEWS")
    results["rows"] = []
    print("| clusters, near_rows, near | rank | 0 | 1 | 2 | 3 | 4 | 5 | mean |\n|---|---|---|---|---|---|---|---|---|")
    for clusters, near_rows, near in CASES:
        name = clusters if clusters == 64 else "k-means"
        for rank in RANKS:
            options = {"clusters": clusters, "near": near, "near_rows": near_rows, "rank": rank, "response": "pooled"}
            by_text = [
                [error(cluster_attention(*layer, **options), e, layer[2]) for layer, e in zip(text, outs, strict=True)]
                for text, outs in zip(texts, exact, strict=True)
            ]
            errors = [sum(layer) / len(layer) for layer in zip(*by_text, strict=True)]
            mean = sum(errors) / len(errors)
            print(
                f"| {name}, {near_rows}, {near} | {rank} | {' | '.join(f'{x:.2f}' for x in errors)} | {mean:.3f} |",
                flush=True,
            )
            results["rows"].append({**options, "clusters": name, "errors": errors, "by_text": by_text, "mean": mean})
    path = Path(__file__).parent / "results" / "cluster_rank.json"
    path.write_text(json.dumps(results, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
