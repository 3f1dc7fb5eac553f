"""Kinds of maps: a small code for every map (PCA, or a convolutional autoencoder), clusters, and which head is where.

Shape legend: M maps (one for each image, layer and head), P patches, s the side they are resized to, z code width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import check_choice
from ..kinds import kinds_checked
from ..train.optimise import descend
from .capture import Captured

SIDE = 16
TINY = 1e-12  # maps that vary less are all alike
CODES = ("autoencoder", "pca")


@dataclass(frozen=True)
class Patterns:
    """Clusters of maps: label (M,) of each, its code (M, z) and place in the plane (M, 2), and of which image, layer
    and head it is, `owner` (M, 3). `error` is the share of the maps' variance that the code loses, `pca_error` that of
    as many principal components; centres (clusters, s, s) are mean maps."""

    labels: Tensor
    codes: Tensor
    plane: Tensor
    owner: Tensor
    centres: Tensor
    error: float
    pca_error: float

    def histograms(self) -> Tensor:
        """Share of a head's maps in each cluster, (layers, heads, clusters)."""
        layers, heads = (int(self.owner[:, i].max()) + 1 for i in (1, 2))
        counts = torch.zeros(layers, heads, len(self.centres))
        counts.index_put_((self.owner[:, 1], self.owner[:, 2], self.labels), torch.ones(len(self.labels)), True)
        return counts / counts.sum(-1, keepdim=True).clamp(min=1)

    def entropies(self) -> Tensor:
        """Entropy in nats of each head's histogram: near 0 for a head that does the same to every image."""
        return torch.special.entr(self.histograms()).sum(-1)


@kinds_checked
def flat_maps(captured: Captured, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """All maps patch to patch, resized to (M, s, s) and divided by their largest size, with their owners (M, 3).

    Scaling by the size lets a faint map and a strong one of the same kind look alike; signs stay.
    """
    p = captured.tokens.prefix
    if captured.queries != list(range(captured.tokens.count)):
        raise ValueError('patterns need the rows of all tokens: capture(model, queries="all")')
    maps, owners = [], []
    for place, layer in enumerate(captured.layers):
        A = captured.maps(layer)[..., p:, p:].float()
        batch, heads = A.shape[:2]
        maps.append(resized(A.flatten(0, 1), side, captured.tokens.grid))
        owners.append(torch.cartesian_prod(torch.arange(batch), torch.tensor([place]), torch.arange(heads)))
    return torch.cat(maps), torch.cat(owners)


def resized(maps: Tensor, side: int = SIDE, grid: tuple[int, ...] | None = None) -> Tensor:
    """Maps (M, P, P) as (M, s, s), the largest size 1.

    On a `grid` (rows, cols) of patches queries and keys are averaged over squares of neighbours, to a grid of
    sqrt(s) x sqrt(s) each, so that near stays near; without one, over neighbours in the sequence.
    """
    part = math.isqrt(side)
    if grid is not None and len(grid) == 2 and part * part == side and maps.shape[-1] != side:
        mode = "area" if min(grid) >= part else "nearest"
        count = len(maps)
        for _ in range(2):  # the keys, then, transposed, the queries
            maps = F.interpolate(maps.unflatten(-1, grid).flatten(0, 1)[:, None], (part, part), mode=mode)
            maps = maps.flatten(1).unflatten(0, (count, -1)).mT
    elif maps.shape[-1] != side:
        mode = "area" if maps.shape[-1] > side else "nearest"
        maps = F.interpolate(maps[:, None], (side, side), mode=mode)[:, 0]
    return maps / maps.abs().amax((-1, -2), keepdim=True).clamp(min=1e-12)


class MapCoder(nn.Module):
    """Convolutional autoencoder of maps (M, s, s), s a multiple of 4, with z numbers between.

    Beside the convolutions goes a linear path, which starts as the principal components of the maps it is made for;
    the convolutions' last layers start at 0. So training begins at the error of PCA, and what it gains is nonlinear.
    """

    def __init__(self, maps: Tensor, code: int = 16, width: int = 8) -> None:
        super().__init__()
        side = maps.shape[-1]
        if side % 4:
            raise ValueError(f"side must be a multiple of 4, got {side}")
        small = side // 4
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GELU(),
            nn.Flatten(), nn.Linear(2 * width * small * small, code),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(code, 2 * width * small * small), nn.GELU(), nn.Unflatten(1, (2 * width, small, small)),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.GELU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )  # fmt: skip
        for last in (self.encoder[-1], self.decoder[-1]):
            for parameter in last.parameters():
                nn.init.zeros_(parameter)
        _, components, mean = pca(maps.flatten(1), code)
        scale = ((maps.flatten(1) - mean) @ components.mT).std(0).clamp(min=1e-6)[:, None]
        self.into = nn.Parameter(components / scale)  # codes of unit variance, which the convolutions take well
        self.out = nn.Parameter((components * scale).mT.contiguous())
        self.mean = nn.Parameter(mean)

    def forward(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (M, z) and reconstructions (M, s, s)."""
        code = (maps.flatten(1) - self.mean) @ self.into.mT + self.encoder(maps[:, None])
        back = code @ self.out.mT + self.mean
        return code, back.reshape(maps.shape) + self.decoder(code)[:, 0]


def pca(x: Tensor, code: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (M, z) of rows (M, n) by their principal components (z, n), and the mean (n,)."""
    mean = x.mean(0)
    _, _, V = torch.linalg.svd((x - mean).double(), full_matrices=False)
    components = V[:code].to(x.dtype)
    return (x - mean) @ components.mT, components, mean


def train_coder(
    maps: Tensor, code: int = 16, *, steps: int = 600, batch: int = 128, lr: float = 2e-3, seed: int = 0
) -> MapCoder:
    """An autoencoder fitted to maps (M, s, s) by mean squared error; the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        coder = MapCoder(maps, code)
    optimizer = torch.optim.AdamW(coder.parameters(), lr=lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.randint(len(maps), (min(batch, len(maps)),), generator=generator) for _ in range(steps))
    with torch.enable_grad():
        descend(optimizer, (F.mse_loss(coder(maps[some])[1], maps[some]) for some in chosen), schedule=schedule)
    return coder.eval()


def kmeans(x: Tensor, clusters: int, *, starts: int = 10, steps: int = 50, seed: int = 0) -> Tensor:
    """Labels (M,) of the best of several k-means runs (k-means++ starts) on rows (M, n)."""
    generator = torch.Generator().manual_seed(seed)
    best, best_cost = torch.zeros(len(x), dtype=torch.long), math.inf
    for _ in range(starts):
        centres = _spread_centres(x, clusters, generator)
        labels = torch.zeros(len(x), dtype=torch.long)
        for _ in range(steps):
            new = torch.cdist(x, centres).argmin(-1)
            if torch.equal(new, labels) and _ > 0:
                break
            labels = new
            for k in range(clusters):
                if (labels == k).any():
                    centres[k] = x[labels == k].mean(0)
        cost = float(torch.cdist(x, centres).amin(-1).square().sum())
        if cost < best_cost:
            best, best_cost = labels, cost
    return best


@kinds_checked
def find_patterns(
    maps: Tensor,
    owner: Tensor | None = None,
    *,
    clusters: int = 6,
    code: int = 16,
    method: str = "autoencoder",
    seed: int = 0,
    steps: int = 600,
) -> Patterns:
    """Clusters of maps (M, s, s), as `flat_maps` gives them.

    Clusters are found among codes whose coordinates count by how much of the maps they explain. Every fifth map is kept
    from fitting the code, and both errors are measured on those (on all where there are fewer than 50). Where fewer
    maps than `clusters` differ there are as many clusters as that, and no more numbers in a code than maps.
    """
    check_choice("method", method, CODES)
    if not 1 <= clusters <= len(maps):
        raise ValueError(f"clusters must be between 1 and the number of maps, {len(maps)}, got {clusters}")
    if len(maps) < 2 or not bool(maps.isfinite().all()):
        raise ValueError(f"maps must be 2 or more without NaN, got {tuple(maps.shape)}")
    held = torch.arange(len(maps)) % 5 == 4
    fitted, tested = (maps[~held], maps[held]) if len(maps) >= 50 else (maps, maps)
    code = min(code, len(fitted))
    variance = float((tested - tested.mean(0)).square().mean())

    def lost(back: Tensor) -> float:
        return float((back - tested).square().mean()) / variance if variance > TINY else 0.0

    _, components, mean = pca(fitted.flatten(1), code)
    back = (tested.flatten(1) - mean) @ components.mT @ components + mean
    error = pca_error = lost(back.reshape(tested.shape))
    codes = (maps.flatten(1) - mean) @ components.mT
    if method == "autoencoder":
        coder = train_coder(fitted, code, seed=seed, steps=steps)
        with torch.no_grad():
            error = lost(coder(tested)[1])
            codes = coder(maps)[0] * coder.out.norm(dim=0)
    codes = (codes - codes.mean(0)) / codes.std().clamp(min=1e-12)
    labels = kmeans(codes, clusters, seed=seed).unique(return_inverse=True)[1]
    centres = torch.stack([maps[labels == k].mean(0) for k in range(int(labels.max()) + 1)])
    owner = torch.zeros(len(maps), 3, dtype=torch.long) if owner is None else owner
    return Patterns(labels, codes, pca(codes, 2)[0], owner, centres, error, pca_error)


def adjusted_rand(a: Tensor, b: Tensor) -> float:
    """Agreement of two labellings beyond chance: 1 for the same partition, about 0 for unrelated ones."""
    table = torch.zeros(int(a.max()) + 1, int(b.max()) + 1, dtype=torch.float64)
    table.index_put_((a, b), torch.ones(len(a), dtype=torch.float64), True)

    def pairs(n: Tensor) -> Tensor:
        return (n * (n - 1) / 2).sum()

    total = len(a) * (len(a) - 1) / 2
    both, rows, columns = pairs(table), pairs(table.sum(1)), pairs(table.sum(0))
    expected = rows * columns / total
    top = (rows + columns) / 2 - expected
    return 1.0 if float(top) == 0 else float((both - expected) / top)


def describe(centre: Tensor) -> str:
    """The name that fits a mean map (s, s) of a square grid of patches best, of those that the study looks for.

    "uniform" where it hardly varies; "self", "near", "row", "column" by correlation with such a map, at least 0.4; "few
    keys" where most of the variance is between columns; "other".
    """
    side = math.isqrt(centre.shape[-1])
    if float(centre.std()) < 0.05 * float(centre.abs().mean()):
        return "uniform"
    if side * side == centre.shape[-1]:
        row = torch.arange(centre.shape[-1]) // side
        column = torch.arange(centre.shape[-1]) % side
        hop = torch.maximum((row[:, None] - row).abs(), (column[:, None] - column).abs())
        templates = {
            "self": hop == 0,
            "near": hop <= 1,
            "row": row[:, None] == row,
            "column": column[:, None] == column,
        }
        scores = {name: _correlation(centre, t.to(centre.dtype)) for name, t in templates.items()}
        name = max(scores, key=lambda key: scores[key])
        if scores[name] > 0.4:
            return name
    between = float(centre.mean(0).var() / centre.var(correction=0).clamp(min=1e-12))
    return "few keys" if between > 0.5 else "other"


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = a.flatten() - a.mean(), b.flatten() - b.mean()
    norm = float(a.norm() * b.norm())
    return float(a @ b) / norm if norm > 1e-9 else 0.0


def _spread_centres(x: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    chosen = [int(torch.randint(len(x), (1,), generator=generator))]
    for _ in range(clusters - 1):
        distance = torch.cdist(x, x[chosen]).amin(-1).square()
        if float(distance.sum()) == 0:
            chosen.append(int(torch.randint(len(x), (1,), generator=generator)))
        else:
            chosen.append(int(torch.multinomial(distance, 1, generator=generator)))
    return x[chosen].clone()
