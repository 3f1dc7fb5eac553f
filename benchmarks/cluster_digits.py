"""What the error of dq is made of, in cluster attention with near clusters in bfloat16 and tokens away from 0.

    TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/cluster_digits.py --means 1 30

dq by its formula (`kernels/cluster/backward.py`) in float64, one rounding of the kernels at a time, and the kernels
themselves beside plain torch: errors relative to the exact dq, which shares no code with either.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from cumulant.cluster import cluster_attention

LOG2 = math.log(2)


def rounded(x: Tensor) -> Tensor:
    return x.float().bfloat16().double()


def two(x: Tensor) -> Tensor:
    """As two numbers of 16 bits."""
    return rounded(x) + rounded(x - rounded(x))


def cut(x: Tensor, bits: int) -> Tensor:
    """With so many binary digits, the others cut off."""
    m, e = torch.frexp(x)
    return torch.ldexp(torch.trunc(m * 2.0**bits) / 2.0**bits, e)


def log_mass(x: Tensor) -> Tensor:
    """log cosh of the square root."""
    s = x.sqrt()
    return s + torch.log1p(torch.exp(-2 * s)) - LOG2


class Case:
    """q, k, v, do (H, L, D), K clusters of m tokens in a row; the two heaviest, by mean, are near to n rows at once."""

    def __init__(self, heads: int, length: int, clusters: int, n: int, means: tuple[float, float]) -> None:
        def tokens(seed: int, mean: float) -> Tensor:
            kind = torch.Generator().manual_seed(seed + 1 + heads + length + 64)  # as tests/kernels has them
            made = torch.randn(heads, length, 64, generator=kind)
            return (made + mean).bfloat16().double()

        self.q, self.k, self.v, self.do = (
            tokens(i, mean) for i, mean in zip((0, 1, 2, 7), (0.0, *means, 0.0), strict=True)
        )
        self.n, self.K, self.scale = n, clusters, 64**-0.5
        self.kc, self.vc = (x.unflatten(1, (clusters, -1)) for x in (self.k, self.v))
        self.key_mean, self.value_mean = self.kc.mean(2), self.vc.mean(2)
        self.var = (self.kc - self.key_mean.unsqueeze(2)).square().mean(2)
        q, centre = (self.q * self.scale).unflatten(1, (-1, n)), self.key_mean.mean(1, keepdim=True)
        mean, var = q.mean(2), q.var(2, correction=0)
        score = mean @ self.key_mean.mT + 0.5 * var @ (self.key_mean - centre).square().mT
        best, which = (score + log_mass((mean.square() + var) @ self.var.mT)).topk(3, -1)
        self.gap = (best[..., 1] - best[..., 2]).min().item()
        near = torch.zeros_like(score, dtype=torch.bool).scatter(-1, which[..., :2], True)
        self.near = near.repeat_interleave(n, 1)  # (H, L, K)

    def origin(self, samples: int) -> Tensor:
        """Where keys are measured from: the mean, or, of evenly spaced samples, their mean but for the extremes (the
        kernels: of 32); of 4, between the middle two, as near to 0 as they allow (the kernels before)."""
        if not samples:
            return self.k.mean(1, keepdim=True)
        some = self.k[:, :: self.k.shape[1] // samples].sort(1).values
        if samples != 4:
            return rounded(some[:, 1:-1].mean(1, keepdim=True))
        a, b = some[:, 1:3].split(1, 1)
        return a.clamp(min=0) + b.clamp(max=0)

    def dq(self, *kinds: str, samples: int = 0) -> Tensor:
        q, k, v, do, scale, m = self.q, self.k, self.v, self.do, self.scale, self.kc.shape[2]
        each = scale * (self.kc - self.key_mean.unsqueeze(2)).mT @ (self.vc - self.value_mean.unsqueeze(2)) / m
        S = two(rounded(each).mean(1)) if "S" in kinds else each.mean(1)
        x = (q * q) @ self.var.mT * scale**2
        z = scale * q @ (self.key_mean - k.mean(1, keepdim=True)).mT + math.log(m) + log_mass(x)
        z = z.masked_fill(self.near, -math.inf)
        tokens = scale * q @ (k - k.mean(1, keepdim=True)).mT
        tokens = tokens.masked_fill(~self.near.repeat_interleave(m, -1), -math.inf)
        f = torch.tanh(x.sqrt()) / x.sqrt()
        top = torch.maximum(z.amax(-1, keepdim=True), tokens.amax(-1, keepdim=True))
        far, weight = (z - top).exp(), (tokens - top).exp()
        weight = rounded(weight) if "p" in kinds else weight
        total = far.sum(-1, keepdim=True) + weight.sum(-1, keepdim=True)
        out = far @ self.value_mean + (far * f).sum(-1, keepdim=True) * (q @ S)
        if "sums" in kinds:
            for start in range(0, k.shape[1], 16):  # sums that many near tokens do not touch stay as they are
                at = slice(start, start + 16)
                here = weight[..., at].amax(-1, keepdim=True) > 0
                out = torch.where(here, cut(out + weight[..., at] @ v[:, at], 23), out)
        else:
            out = out + weight @ v
        out = two(out / total) if "out" in kinds else out / total
        lse = top + total.log()
        p, pl = (z - lse).exp(), (tokens - lse).exp()
        delta, h = (do * out).sum(-1, keepdim=True), ((do @ S.mT) * q).sum(-1, keepdim=True)
        dz = p * (do @ self.value_mean.mT + f * h - delta)
        dx = dz * f + p * h * (1 - f - x * f * f) / x
        near = pl * (do @ v.mT - delta)
        near = rounded(near * scale) / scale if "dz" in kinds else near
        origin = self.origin(samples)
        found = scale * (dz @ (self.key_mean - origin) + near @ (k - origin))
        turned = rounded(dx) @ rounded(self.var * scale**2) if "dx" in kinds else dx @ (self.var * scale**2)
        return found + q * turned + (p * f).sum(-1, keepdim=True) * (do @ S.mT)

    def by(self, backend: str) -> Tensor:
        leaves = [x.bfloat16().unsqueeze(0).requires_grad_() for x in (self.q, self.k, self.v)]
        options = {"near": 2, "near_rows": self.n, "rank": "mean", "response": "pooled", "backend": backend}
        out = cluster_attention(*leaves, clusters=self.K, **options)
        return torch.autograd.grad(out, leaves[0], self.do.to(out).unsqueeze(0))[0].squeeze(0)


ROUNDINGS = {
    "dq itself, as in plain torch": (),
    "what the output lost, in 16 bits": ("out",),
    "weights of near tokens, forward": ("p",),
    "sums of 16 products cut off at 23 bits (tensor cores; a guess)": ("sums",),
    "S of each cluster": ("S",),
    "dz of near tokens": ("dz",),
    "dx and var": ("dx",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--means", type=float, nargs=2, default=(1.0, 30.0), help="of keys and values")
    parser.add_argument("--length", type=int, default=1536)
    parser.add_argument("--clusters", type=int, default=12)
    parser.add_argument("--heads", type=int, default=1)
    args = parser.parse_args()
    case = Case(args.heads, args.length, args.clusters, 128, tuple(args.means))
    exact = case.dq()

    def error(x: Tensor) -> float:
        return ((x.double() - exact).norm() / exact.norm()).item()

    print(f"least gap between the scores of a cluster that is near and one that is not: {case.gap:.1e}")
    print("| rounded | error of dq, 1e-3 |\n|---|---|")
    for name, kinds in ROUNDINGS.items():
        found = case.dq(*kinds, samples=32) if kinds else rounded(exact)
        print(f"| {name} | {1e3 * error(found):.2f} |")
    every = ("out", "p", "S", "dz", "dx")
    for samples in (4, 32, 0):
        name = f"{samples} samples for an origin" if samples else "the mean key for an origin"
        with_sums = rounded(case.dq(*every, "sums", samples=samples))
        whole = rounded(case.dq(*every, samples=samples))
        print(f"| all, {name} | {1e3 * error(whole):.2f}, {1e3 * error(with_sums):.2f} with sums cut off |")
    plain, kernels = error(case.by("reference")), error(case.by("triton"))
    print(
        f"| plain torch | {1e3 * plain:.2f} |\n| kernels | {1e3 * kernels:.2f}, {kernels / plain:.2f} x plain torch |"
    )


if __name__ == "__main__":
    main()
