"""`cumulant bench speed`: forward, backward and both, as time, as share of the memory floor and as peak memory.

The floor of a linear attention is the time to move its tensors once: q, k, v in and the output out (4 tensors)
forward, q, k, v and the output's gradient in and three gradients out (7) backward, at the copy bandwidth measured in
the same run. Nothing is timed before its result was compared with the float64 reference.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cumulant.attention import attention
from cumulant.bench.command import Efficiency, Speed
from cumulant.bench.error import relative_error
from cumulant.bench.provenance import provenance
from cumulant.bench.report import command
from cumulant.bench.scaling import in_turns, peak_bytes
from cumulant.style import new_figure, palette, save, styled
from cumulant.train.files import claim_room

Contender = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Row:
    """One contender at one length; None where it was not run."""

    name: str
    L: int
    B: int
    milliseconds: dict[str, float] = field(default_factory=dict)  # forward, backward, both
    floor_share: dict[str, float] = field(default_factory=dict)  # forward, backward; linear attentions only
    peak_bytes: int | None = None  # above the inputs, forward and backward
    note: str = ""


def run(settings: Speed, progress: Callable[[str], None] = print) -> dict[str, Any]:
    device, name = placed(settings)
    dtype = getattr(torch, name)
    for L in settings.lengths:
        if L < 1:
            raise ValueError(f"lengths must be positive, got {L}")
    claim_room(settings.out, 0)
    new_figure(1, 1, (1, 1))  # a missing package is told before minutes of measuring
    bandwidth = copy_bandwidth(device)
    rows: list[Row] = []

    def record() -> dict[str, Any]:
        result = {
            "rows": [vars(row) for row in rows],
            "copy_bytes_per_second": bandwidth,
            "setting": {
                "heads": settings.heads, "dim": settings.dim, "dtype": name, "device": device, "causal": settings.causal
            },
            **provenance(command(settings)),
        }  # fmt: skip
        if device == "cuda":
            result["machine"]["gpu"] = torch.cuda.get_device_name()
        (settings.out / "speed.json").write_text(json.dumps(result, indent=1) + "\n")
        return result

    for L in settings.lengths:
        size = settings.heads * L * settings.dim
        numbers = settings.numbers or (100_000_000 if device == "cuda" else size)
        B = max(1, round(numbers / size))
        torch.compiler.reset()  # compiled peers are compiled for one length at a time
        for contender, (function, quadratic) in contenders(settings, device).items():
            if quadratic and L > settings.longest_softmax:
                continue
            row = measure(contender, function, quadratic, settings, B, L, device, dtype, bandwidth)
            progress(line(row))
            rows.append(row)
        record()  # a run that is stopped keeps the lengths that it has
    result = record()
    plot(result, settings.out / "speed.svg")
    return result


def placed(settings: Speed | Efficiency) -> tuple[str, str]:
    """Device and dtype, where "auto" was chosen as this machine has it."""
    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no GPU; use --device cpu")
    return device, settings.dtype if settings.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"


def contenders(settings: Speed, device: str) -> dict[str, tuple[Contender, bool]]:
    """Name -> function and whether it is quadratic in the length."""
    causal = settings.causal

    def softmax(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    table: dict[str, tuple[Contender, bool]] = {}
    for order in (2, 3):
        table[f"cumulant{order}"] = partial(attention, order=order, is_causal=causal), False
        plain = partial(attention, order=order, is_causal=causal, backend="reference")
        table[f"cumulant{order}, plain torch"] = plain, False
        table[f"cumulant{order}, torch.compile"] = torch.compile(plain, dynamic=False), False
    table["softmax, flash"] = partial(softmax, SDPBackend.FLASH_ATTENTION), True
    if device == "cuda":
        table["softmax, cuDNN"] = partial(softmax, SDPBackend.CUDNN_ATTENTION), True
        try:
            from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            pass
        else:

            def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                tokens_first = (x.transpose(1, 2) for x in (q, k, v))
                return chunk_linear_attn(*tokens_first, normalize=False)[0].transpose(1, 2)

            if causal:
                table["linear, flash-linear-attention"] = chunked, False
    return table


def measure(
    name: str, function: Contender, quadratic: bool, settings: Speed, B: int, L: int, device: str, dtype: torch.dtype,
    bandwidth: float,
) -> Row:  # fmt: skip
    row = Row(name, L, B)
    make = torch.Generator(device).manual_seed(L)
    shape = (B, settings.heads, L, settings.dim)
    try:
        q, k, v, grad = (
            (torch.randn(shape, device=device, generator=make) + mean).to(dtype) for mean in (0.2, 1.0, 0.5, 0.0)
        )
        problem = wrong(name, function, quadratic, settings, q, k, v)
        if problem:
            row.note = problem
            return row
        with torch.no_grad():
            row.milliseconds["forward"] = timed(lambda: function(q, k, v), device)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        row.milliseconds["backward"] = timed(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), device)
        row.milliseconds["both"] = timed(lambda: torch.autograd.grad(function(*leaves), leaves, grad), device)
        if device == "cuda":
            row.peak_bytes = peak_bytes(lambda: torch.autograd.grad(function(*leaves), leaves, grad), device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        row.note = did_not_run(error)
        return row
    if not quadratic:
        tensor = q.numel() * q.element_size() / bandwidth * 1e3
        row.floor_share = {
            "forward": 4 * tensor / row.milliseconds["forward"],
            "backward": 7 * tensor / row.milliseconds["backward"],
        }
    return row


def wrong(
    name: str, function: Contender, quadratic: bool, settings: Speed, q: Tensor, k: Tensor, v: Tensor
) -> str | None:
    """What is wrong with a contender's result on its own inputs (a slice of the batch), or None."""
    if not name.startswith(("cumulant", "softmax")):
        return None  # another definition of attention: there is nothing of ours to compare it with
    slices = [x[:1] for x in (q, k, v)]
    exact = [x.double() for x in slices]
    if quadratic:
        if q.shape[-2] > 4096:  # the reference would need the L x L matrix in float64
            return None
        expected = F.scaled_dot_product_attention(exact[0], exact[1], exact[2], is_causal=settings.causal)
    else:
        order = int(name[len("cumulant")])
        expected = attention(*exact, order=order, is_causal=settings.causal, backend="reference")
    error = relative_error(function(*slices), expected)
    bound = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}[q.dtype]
    return None if error < bound else f"off by {error:.1e} (relative): not timed"


def timed(function: Callable[[], Any], device: str) -> float:
    """Median milliseconds."""
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(function, warmup=25, rep=100, return_mode="median"))
    function()
    (samples,) = in_turns({"": function}, 50, 0.3, least=5).values()
    return 1e3 * statistics.median(samples)


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a copy that fits no cache."""
    source = torch.empty(1 << (30 if device == "cuda" else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (timed(lambda: target.copy_(source), device) * 1e-3)


def did_not_run(error: Exception) -> str:
    """The note of a row that could not be measured."""
    return f"did not run: {(str(error).splitlines() or [type(error).__name__])[0][:120]}"


def line(row: Row) -> str:
    start = f"{row.name:32s} B {row.B:5d} L {row.L:7d}"
    if row.note:
        return f"{start}  {row.note}"
    times = "  ".join(f"{phase} {row.milliseconds[phase]:9.3f} ms" for phase in ("forward", "backward", "both"))
    shares = "".join(f"  {row.floor_share[x]:.2f}" for x in row.floor_share)
    memory = "" if row.peak_bytes is None else f"  peak {row.peak_bytes / 2**20:,.0f} MiB"
    return f"{start}  {times}{'  of the floor' + shares if shares else ''}{memory}"


@styled
def plot(result: dict[str, Any], path: Path) -> None:
    """Forward and backward together against length, time per token so that linear cost is a flat line."""
    figure, ((axes,),) = new_figure(1, 1, (7.5, 4.6))
    rows = [row for row in result["rows"] if not row["note"]]
    colours = palette(names := dict.fromkeys(row["name"] for row in rows))
    for name in names:
        points = [
            (row["L"], 1e6 * row["milliseconds"]["both"] / (row["B"] * row["L"])) for row in rows if row["name"] == name
        ]
        ours = name in ("cumulant2", "cumulant3")
        axes.plot(
            *zip(*points, strict=True), marker="o", markersize=4, label=name, color=colours[name],
            linewidth=2.4 if ours else 1.2, linestyle="-" if ours or "softmax" in name else "--",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="sequence length", ylabel="forward + backward, ns per token")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    setting = result["setting"]
    where = result["machine"].get("gpu") or result["machine"]["processor"]
    axes.set_title(f"{where}, {setting['dtype']}, {setting['heads']} heads of {setting['dim']}", fontsize=10)
    save(figure, path, ("svg",))
