"""Every public function as a newcomer calls it on a GPU: which of them run in a kernel, and which do not.

    PYTHONPATH=src python benchmarks/gpu_public.py             one line a call; exit status 1 where one is silently slow
    PYTHONPATH=src python benchmarks/gpu_public.py --only zoo  those whose name begins so

A call may take a kernel of ours, torch's fused softmax, or plain torch if it says once which option stands in the way
(`SlowPathWarning`). What is a handful of matrix products by nature, and has no kernel anywhere, stands in PRODUCTS with
the reason. Everything else fails. Outputs and gradients must be finite; whether they are right is asked elsewhere
(`gpu_called.py --check`, `make test-gpu`). JSON goes to $OUT/gpu_public.json if OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cumulant
from cumulant import Moments, SlidingWindow, Stream, attention, attention_varlen, cluster_attention, zoo
from cumulant.bench.provenance import provenance
from cumulant.cluster import Blocks, ClusterStream, KMeans, Tree
from cumulant.kernels import notice
from cumulant.kernels.notice import SlowPathWarning
from cumulant.nn import CumulantAttention, create_layer, layers

B, H, L, D = 2, 4, 1024, 64  # sequences, heads, tokens, width
C = H * D
DTYPE = torch.bfloat16
DEVICE = "cuda"
# What has no kernel because it is matrix products, or a reading of single rows: what begins so -> why.
PRODUCTS = {
    "scores": "weights are asked for, which are products of queries and keys",
    "cluster_scores": "weights are asked for, as of attention to the unit vectors",
    "Moments": "the reference that kernels are compared with: four products in float32",
    "SlidingWindow": "moments taken in and out: products of a few tokens",
    "ClusterStream": "one row against the state: products of single tokens",
    "zoo: linear": "two products a head",
    "zoo: cumulant1": "the mean of the values",
    "zoo: cosformer": "two products a head",
    "zoo: flow": "two products a head",
    "zoo: focused_linear": "two products a head",
    "zoo: rala": "two products a head",
    "zoo: mala": "two products a head",
    "zoo: agent": "softmax over a few agents, where fused kernels are slow: products",
    "zoo: combiner": "products of blocks",
    "zoo: aaren": "a scan of sums",
    "layer: lama": "one query a head, and keys of one number: products",
    "zoo: hierarchical": "products of blocks",
    "layer: rcmha": "queries meet offsets as well as keys: products",
}


def tensors(length: int = L, heads: int = H, grad: bool = True) -> list[Tensor]:
    made = [torch.randn(B, heads, length, D, device=DEVICE).to(DTYPE) for _ in range(3)]
    return [x.requires_grad_(grad) for x in made]


def called(function: Callable[..., Tensor], length: int = L, **options: Any) -> Callable[[], Any]:
    """A call of query, key and value with gradients."""

    def run() -> Any:
        leaves = tensors(length)
        out = function(*leaves, **options)
        return out, torch.autograd.grad(out, leaves, torch.ones_like(out))

    return run


def masked(kind: torch.dtype) -> Tensor:
    return (torch.arange(L, device=DEVICE) < torch.tensor([[L - 100], [L]], device=DEVICE)).to(kind)


def packed() -> Any:
    lengths = torch.tensor([0, 300, L], dtype=torch.int32, device=DEVICE)
    query, key, value = (torch.randn(L, H, D, device=DEVICE).to(DTYPE).requires_grad_() for _ in range(3))
    out = attention_varlen(query, key, value, lengths, lengths, L, L)
    return out, torch.autograd.grad(out, (query, key, value), torch.ones_like(out))


def module(make: Callable[[], nn.Module], shape: tuple[int, ...] = (B, L, C), **options: Any) -> Any:
    """A step of a layer or a model."""
    made = make().to(DEVICE, DTYPE)
    out = made(torch.randn(shape, device=DEVICE).to(DTYPE), **options)
    out.float().square().mean().backward()
    return out, [x.grad for x in made.parameters() if x.grad is not None]


def streamed(stream: Any) -> Any:
    query, key, value = tensors(grad=False)
    stream.append(key, value)
    one = [x[..., :1, :] for x in (query, key, value)]
    return (stream.apply(one[0]) if isinstance(stream, SlidingWindow) else stream.step(*one)), ()


def converted() -> nn.Module:
    model = cumulant.create_model(VIT, img_size=512, num_classes=10).to(DEVICE)
    cumulant.convert(model, "cumulant3")
    return model


def moments() -> Any:
    query, key, value = tensors()
    return Moments.of(key, value).apply(query), ()


VIT = "vit_tiny_patch16_224"
PICTURE = (1, 3, 512, 512)  # 1,025 tokens
# what layers cannot do without
MADE: dict[str, Any] = {"rcmha": {"offsets": L}, "biformer": {"grid_size": (32, 32)}}
ASKED: dict[str, Any] = {"axial": {"grid": (4, 16, 16)}}
CALLS: dict[str, Callable[[], Any]] = {
    "attention": called(attention),
    "attention(order=2)": called(attention, order=2),
    "attention(is_causal=True)": called(attention, is_causal=True),
    "attention(key_mask=bool)": lambda: called(attention, key_mask=masked(torch.bool))(),
    "attention(key_mask=weights)": lambda: called(attention, key_mask=masked(torch.float32))(),
    'attention(order=2, closure="tanh")': called(attention, order=2, closure="tanh"),
    'attention(around="mean")': called(attention, around="mean"),
    "attention(full=True)": called(attention, full=True),
    "attention_varlen": packed,
    "cluster_attention(clusters=16)": called(cluster_attention, clusters=16),
    "cluster_attention(clusters=16, near=2)": called(cluster_attention, clusters=16, near=2),
    "cluster_attention, 256 tokens": called(cluster_attention, 256, clusters=16),
    "cluster_attention(near=2), 256 tokens": called(cluster_attention, 256, clusters=16, near=2),
    "cluster_attention(grid=)": called(cluster_attention, clusters=(4, 4), grid=(32, 32), near=2),
    "cluster_attention(prefix=1)": called(cluster_attention, 1025, clusters=16, near=2, prefix=1),
    'cluster_attention(near="neighbours")': called(cluster_attention, clusters=16, near="neighbours"),
    "cluster_attention(is_causal=True)": called(cluster_attention, clusters=16, is_causal=True),
    "cluster_attention(is_causal=True, near=2)": called(cluster_attention, clusters=16, is_causal=True, near=2),
    "cluster_attention(is_causal=True, near=2, prefix=4)": called(
        cluster_attention, clusters=16, is_causal=True, near=2, prefix=4
    ),
    "cluster_attention(Blocks)": called(cluster_attention, clusters=Blocks(64, keep=4, recent=1), is_causal=True),
    "cluster_attention(is_causal=True, prefix=4)": called(cluster_attention, clusters=16, is_causal=True, prefix=4),
    "cluster_attention(KMeans)": called(cluster_attention, clusters=KMeans(16)),
    "cluster_attention(KMeans, near=2)": called(cluster_attention, clusters=KMeans(16), near=2),
    "cluster_attention(Tree)": called(cluster_attention, clusters=Tree(16)),
    "cluster_attention(Tree, near=2)": called(cluster_attention, clusters=Tree(16), near=2),
    "cluster_attention(key_mask=bool)": lambda: called(
        cluster_attention, clusters=16, near=2, key_mask=masked(torch.bool)
    )(),
    "cluster_attention(key_mask=weights)": lambda: called(
        cluster_attention, clusters=16, near=2, key_mask=masked(torch.float32)
    )(),
    "scores": lambda: (cumulant.scores(*tensors()[:2]), ()),
    "cluster_scores": lambda: (cumulant.cluster_scores(*tensors(256)[:2], clusters=16), ()),
    "Moments.of and apply": moments,
    "Stream": lambda: streamed(Stream(order=2)),
    "SlidingWindow": lambda: streamed(SlidingWindow(512)),
    "ClusterStream": lambda: streamed(ClusterStream(Blocks(64, keep=4))),
    "nn.CumulantAttention(order=2)": partial(module, lambda: CumulantAttention(C, H, order=2, fold=False)),
    "nn.CumulantAttention(order=2), folded": partial(module, lambda: CumulantAttention(C, H, order=2, fold=True)),
    "nn.CumulantAttention": partial(module, lambda: CumulantAttention(C, H)),
    "create_model, cumulant3": partial(
        module, lambda: cumulant.create_model(VIT, attention="cumulant3", img_size=512, num_classes=10), PICTURE
    ),
    "create_model, cluster16": partial(
        module, lambda: cumulant.create_model(VIT, attention="cluster16", img_size=512, num_classes=10), PICTURE
    ),
    "create_model, softmax": partial(
        module, lambda: cumulant.create_model(VIT, img_size=512, num_classes=10), PICTURE
    ),
    "convert": partial(module, converted, PICTURE),
    **{f"zoo: {name}": called(zoo.get(name), grid=(32, 32)) for name in zoo.names() if zoo.get(name).noncausal},
    **{
        f"zoo: {name}": called(zoo.get(name), is_causal=True) for name in zoo.names() if not zoo.get(name).noncausal
    },
    **{
        f"layer: {name}": partial(
            module, partial(create_layer, name, C, H, **MADE.get(name, {})), **ASKED.get(name, {})
        )
        for name in layers()
    },
}  # fmt: skip


@contextmanager
def watching() -> Iterator[dict[str, Any]]:
    """Counts launches of our kernels and calls of torch's fused softmax, and collects what is said."""
    from triton.runtime.jit import JITFunction

    from cumulant.kernels.tokens import Kernel

    seen: dict[str, Any] = {"launches": 0, "softmax": 0, "said": []}

    def counted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            seen[what] += 1
            return function(*given, **named)

        return run

    with mock.patch.multiple(
        Kernel, start=counted("launches", Kernel.start), launched=counted("launches", Kernel.launched)
    ), mock.patch.object(JITFunction, "run", counted("launches", JITFunction.run)), mock.patch.object(
        F, "scaled_dot_product_attention", counted("softmax", F.scaled_dot_product_attention)
    ), warnings.catch_warnings(record=True) as caught:  # fmt: skip
        warnings.simplefilter("always")
        notice.forget()
        yield seen
    seen["said"] = [str(w.message) for w in caught if issubclass(w.category, SlowPathWarning)]


def finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def verdict(name: str) -> tuple[str, str]:
    """What a call took: "kernel", "fused softmax", "said", "products", or "SILENT"; and what is to be said of it."""
    torch.manual_seed(0)
    with watching() as seen:
        out, gradients = CALLS[name]()
    if not all(map(finite, (out, *gradients))):
        return "NOT FINITE", ""
    reason = next((why for begin, why in PRODUCTS.items() if name.startswith(begin)), None)
    if seen["said"]:
        return "said", seen["said"][0]
    if seen["launches"]:
        return "kernel", f"{seen['launches']} launches" + (
            "; no product any more: take it off PRODUCTS" if reason else ""
        )
    if seen["softmax"]:
        return "fused softmax", ""
    if reason is not None:
        return "products", reason
    return ("fused softmax", "") if fused(CALLS[name]) else ("SILENT", "plain torch, and nothing was said")


def fused(call: Callable[[], Any]) -> bool:
    """Whether a call runs a fused attention kernel of torch by another door."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return any(re.search("flash|fmha|attention|sdpa", event.key, re.IGNORECASE) for event in trace.key_averages())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="calls whose name begins so")
    options = parser.parse_args()
    rows, wrong = {}, 0
    for name in CALLS:
        if not name.startswith(options.only):
            continue
        try:
            rows[name] = verdict(name)
        except Exception as problem:
            rows[name] = "ERROR", f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
        wrong += rows[name][0].isupper()
        print(f"{rows[name][0]:14s} {name}: {rows[name][1]}", flush=True)
        if os.environ.get("OUT"):
            found = provenance("python benchmarks/gpu_public.py", gpu=True) | {"calls": rows}
            Path(os.environ["OUT"], "gpu_public.json").write_text(json.dumps(found, indent=1, default=str))
    print(f"{len(rows)} calls, {wrong} wrong")
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    main()
