"""The tables of docs/performance.md and docs/lab/speed.md, from the records of `benchmarks/gpu_all.py` and
`benchmarks/cpu.py`: `python -m tools.pages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tools import plot_gpu
from tools.pages import origin, table

Result = Mapping[str, Any]
CLUSTER = "`cluster_attention(clusters=64, near=2)`, B 8, 16,384 tokens"
CALLS = {  # of gpu_called.py
    "cluster": CLUSTER,
    "long": "256 clusters, B 2, 65,536",
    "4k": "64 clusters, B 8, 4,096",
    "grid 4k": "`clusters=(8, 8), grid=(64, 64), near=4`, B 1, 4 heads of 96",
    "grid 64k": "`clusters=(8, 8), grid=(256, 256), near=4`, B 1, 4 heads of 96",
    "grid 64k, 256": "`clusters=(16, 16), grid=(256, 256), near=4`, B 1, 4 heads of 96",
    "masked": "the first with a `key_mask` of padding",
    "grouped": "the first with 4 key heads",
    "prefix": "the first with `prefix=1`",
    "far only": "the first with `near=0`",
    "causal 64": "`clusters=64, is_causal=True`, B 8, 16,384",
    "causal near": "the same with `near=2`: each row chooses two blocks of the past",
    "causal": "`clusters=Blocks(64, keep=16, recent=1), is_causal=True`, B 1",
    "causal means": "`clusters=Blocks(64, keep=16, recent=1), response=0`, causal, B 8",
    "causal sinks": "the same with 4 sinks, `prefix=4`",
    "blocks": "`clusters=64`, B 1, 16,384",
    "kmeans": "`clusters=KMeans(64)`, B 1, 16,384",
    "kmeans near": "the same with `near=2`",
    "kmeans, B 8": "`clusters=KMeans(64)`, B 8, 16,384",
    "kmeans near, B 8": "the same with `near=2`",
    "short": "`clusters=16`, B 256, 256 tokens",
    "order 2, 64": "`attention(order=2)`, B 256, 64 tokens",
    "order 3, 64": "`attention(order=3)`, B 256, 64 tokens",
    "order 2, 197": "`attention(order=2)`, B 64, 197",
    "order 2, 16k": "`attention(order=2)`, B 8, 16,384",
    "order 3, 16k": "`attention(order=3)`, B 8, 16,384",
    "causal 2, 16k": "`attention(order=2, is_causal=True)`, B 8, 16,384",
    "causal 3, 16k": "`attention(order=3, is_causal=True)`, B 8, 16,384",
}
COUNTED = ("passed", "failed", "skipped")
FRONT = {  # calls of the first table: length, case of gpu_called.py
    "64 clusters, `near=2` (256 at 65,536)": {4096: "4k", 16384: "cluster", 65536: "long"},
    "`is_causal=True`, order 2": {16384: "causal 2, 16k"},
    "`is_causal=True`, order 3": {16384: "causal 3, 16k"},
}
# The best public kernel that is not causal, second order without means; measured on such a machine before.
PEER = {
    64: (0.36, 0.44), 197: (0.62, 0.60), 577: (0.78, 0.71), 1568: (0.90, 0.81), 4096: (0.96, 0.83),
    16384: (0.71, 0.76), 65536: (0.26, 0.46),
}  # fmt: skip


def made(result: Result) -> str:
    """Where a record came from; those from before 2026-11-18 do not all say."""
    try:
        return origin(result)
    except (KeyError, AttributeError):
        return f"{result.get('device', 'NVIDIA H200')}, a commit that was not recorded."


def times(number: float) -> str:
    return f"{number:.0f}" if number >= 20 else f"{number:.1f}"


def front_block(results: Mapping[str, Result]) -> str:
    """The first table of the page: how many times as long softmax takes, by device, call and length."""
    parts = []
    if {"gpu_dense", "gpu_called"} <= set(results):
        parts += [
            "**One H200**, bfloat16, forward / training step:",
            gpu_front(results["gpu_dense"], results["gpu_called"]),
        ]
    if "cpu" in results:
        parts += ["**Two CPU cores**, float32, forward; in brackets a training step:", cpu_front(results["cpu"])]
    return "\n\n".join(parts) or "Not run yet."


def gpu_front(dense: Result, called: Result) -> str:
    found: dict[str, dict[int, list[float]]] = {}
    for which in plot_gpu.NAMES:
        softmax = dict(plot_gpu.points(dense, called, "sdpa_", 2, which))
        for order in (2, 3):
            for length, time in plot_gpu.points(dense, called, "", order, which):
                if length in softmax:
                    row = found.setdefault(f"`attention(order={order})`", {})
                    row.setdefault(length, []).append(softmax[length] / time)
    for label, cases in FRONT.items():
        known = {length: called["cases"][name] for length, name in cases.items() if name in called["cases"]}
        found[label] = {length: [case["forward_times"], case["step_times"]] for length, case in known.items()}
    lengths = sorted({length for row in found.values() for length in row})
    rows = [[name, *(" / ".join(map(times, row.get(L, ()))) for L in lengths)] for name, row in found.items()]
    return f"{table(['tokens', *(f'{L:,}' for L in lengths)], rows)}\n\n{made(dense)}"


def cpu_front(result: Result) -> str:
    lengths = list(dict.fromkeys(row["L"] for row in result["speed"]))
    own = {(row["order"], row["L"]): row["softmax_over_ours"]["ratio"] for row in result["speed"]}
    rows = [[f"`attention(order={n})`", *(times(own[n, L]) if (n, L) in own else "" for L in lengths)] for n in (2, 3)]
    near = {
        row["L"]: (row["softmax_over_ours"]["ratio"], row.get("softmax_step_over_ours"))
        for row in result.get("clusters", ())
    }
    cells = [f"{times(near[L][0])} ({times(near[L][1]['ratio'])})" if L in near and near[L][1] else "" for L in lengths]
    rows.append(["64 clusters, `near=2`", *cells])
    return f"{table(['tokens', *(f'{L:,}' for L in lengths)], rows)}\n\n{origin(result)}"


def calls_block(result: Result) -> str:
    """Public calls beside softmax, in a CUDA graph."""
    rows = []
    for name, label in CALLS.items():
        row = result["cases"].get(name)
        if row is not None:
            cells = [
                [f"{row[w]:.3f}", f"{row[f'softmax_{w}']:.3g}", times(row[f"{w}_times"])] for w in ("forward", "step")
            ]
            rows.append([label, *cells[0], *cells[1]])
    head = ["call", "forward, ms", "softmax", "times", "step, ms", "softmax", "times"]
    return f"{table(head, rows)}\n\n{made(result)}"


def called_block(result: Result) -> str:
    """Public calls beside softmax, with goals and from Python."""
    rows = []
    for name, label in CALLS.items():
        row = result["cases"].get(name)
        if row is None:
            why = "off by more than twice plain torch: no time" if name in result.get("wrong", ()) else "not measured"
            rows.append([label, why, *[""] * 7])
            continue
        cells = [label]
        for what, goal in zip(("forward", "step"), row.get("goal", (0, 0)), strict=True):
            cells += [
                f"{row[what]:.3f} ({row[f'softmax_{what}']:.3g})", times(row[f"{what}_times"]),
                f"{goal:g}" if goal else "", times(row[f"{what}_called_times"]),
            ]  # fmt: skip
        rows.append(cells)
    head = ["call"]
    for what in ("forward", "step"):
        head += [f"{what} ms (softmax)", "times", "goal", "from Python"]
    how = [f"From Python: {result['called']}."] if "called" in result else []
    how += [result["note"]] if "note" in result else []
    return "\n\n".join([table(head, rows), *how, made(result)])


def fraction(pair: tuple[float, float]) -> str:
    return " / ".join(f"{x:.2f}".removeprefix("0") for x in pair)


def by_length(result: Result, order: int) -> dict[int, Mapping[str, float]]:
    return {row["L"]: row for row in result["rows"] if row["order"] == order}


def dense_block(result: Result) -> str:
    """Fractions of the floor, and milliseconds beside softmax."""
    orders = {order: by_length(result, order) for order in (2, 3)}
    lengths = list(orders[2])
    rows = [
        [f"order {n}", *(fraction((found[L]["forward_fraction"], found[L]["backward_fraction"])) for L in lengths)]
        for n, found in orders.items()
    ]
    rows.append(["peer", *(fraction(PEER[L]) if L in PEER else "" for L in lengths)])
    parts = [table(["tokens", *(f"{L:,}" for L in lengths)], rows)]
    seen = [L for L in lengths if "sdpa_forward_ms" in orders[2][L]]
    if seen:
        own = [
            [f"order {n}", *(f"{found[L]['forward_ms']:.3f} / {found[L]['both_ms']:.3f}" for L in seen)]
            for n, found in orders.items()
        ]
        peer = [f"{orders[2][L]['sdpa_forward_ms']:.3f} / {orders[2][L]['sdpa_both_ms']:.3f}" for L in seen]
        head = ["tokens (batch)", *(f"{L:,} ({orders[2][L]['B']})" for L in seen)]
        parts += ["Milliseconds, forward / forward and backward; softmax is the better of flash and cuDNN:"]
        parts += [table(head, [["softmax", *peer], *own])]
    return "\n\n".join([*parts, made(result)])


def more_block(results: Mapping[str, Result]) -> str:
    """Folded layer, decoding."""
    rows = []
    known = [results.get(name, {}) for name in ("fold-cuda", "gpu_decode")]
    fold, decode = known
    for row in fold.get("rows", ()):
        if row["L"] >= 1568:
            forward, step = row["forward_ms"], row["step_ms"]
            label = f"folded layer, width {row['C']}, {row['L']:,} tokens: projections alone / folded, forward; step"
            found = " ".join(
                f"{t['projections']:.3f} / {t['folded']:.3f}{end}" for t, end in ((forward, ";"), (step, ""))
            )
            rows.append([label, found, f"`{fold['command']}`"])
    for order, row in decode.get("orders", {}).items():
        label = f"one token of a stream, 64 sequences, order {order}, in a graph / from Python"
        rows.append([label, f"{row['graph_us'] / 1e3:.4f} / {row['called_us'] / 1e3:.3f}", f"`{decode['command']}`"])
    origins = list(dict.fromkeys(made(x) for x in known if x))
    return "\n\n".join([table(["also measured", "ms", "command"], rows), *origins]) if rows else "Not run yet."


def host_block(result: Result) -> str:
    rows = []
    for name, ways in result["calls"].items():
        forward, step, peer_forward, peer_step = ways["repeated"]
        rows.append([
            f"`{name}`", f"{forward:.0f} ({peer_forward:.0f})", f"{forward - peer_forward:+.0f}",
            f"{step:.0f} ({peer_step:.0f})", f"{step - peer_step:+.0f}",
        ])  # fmt: skip
    head = ["call", "forward, microseconds (SDPA)", "more", "step (SDPA)", "more"]
    return "\n\n".join([table(head, rows), made(result)])


def first_block(result: Result) -> str:
    rows = [
        [f"`{name}`", *(" + ".join(f"{x:.2f}" for x in pair) for pair in found)]
        for name, found in result["calls"].items()
    ]
    return "\n\n".join(
        [table(["first call, forward + backward, s", "empty cache", "full cache"], rows), origin(result)]
    )


def public_block(result: Result) -> str:
    """Which public calls take what."""
    kinds: dict[str, list[str]] = {}
    for name, (took, _) in result["calls"].items():
        kinds.setdefault(took, []).append(name)
    rows = [[took, str(len(names)), ", ".join(f"`{name}`" for name in names)] for took, names in kinds.items()]
    return "\n\n".join([table(["takes", "calls", "which"], rows), made(result)])


def tests_block(result: Result) -> str:
    counts = {path: [str(found[key]) for key in COUNTED] for path, found in result["files"].items()}
    rows = [[f"`{path}`", *cells] for path, cells in counts.items()]
    sums = [f"{sum(found[key] for found in result['files'].values())}" for key in COUNTED]
    return "\n\n".join([table(["tests", *COUNTED], [*rows, ["**all**", *sums]]), suite(result)])


def tests_in_all(result: Result) -> str:
    sums = [f"{sum(found[key] for found in result['files'].values())} {key}" for key in COUNTED]
    return f"{', '.join(sums)}. {suite(result)}"


def suite(result: Result) -> str:
    left = f", {result['left']} left out" if result.get("left") else ""
    return (
        f"Commit {result['commit']}, {result['machine']}, torch {result['torch']}, Triton {result['triton']}: "
        f"{result['seconds']:.0f} seconds{left}."
    )


def profile_block(result: Result) -> str:
    """Milliseconds of the longest kernels of a training step."""
    rows = []
    for name, kernels in result["cases"].items():
        total, first = sum(kernels.values()), list(kernels.items())[:7]
        rows.append([CALLS[name], f"{total:.2f}", ", ".join(f"{kernel} {ms:.2f}" for kernel, ms in first)])
    return "\n\n".join([table(["a step of", "ms in kernels", "of these"], rows), made(result)])


def bench_block(result: Result) -> str:
    """What `cumulant bench speed` printed: a row a contender, a column a length."""
    found = {(row["name"], row["L"]): row for row in result["rows"]}
    lengths = sorted({L for _, L in found})

    def cell(row: Result | None) -> str:
        if row is None or not row["milliseconds"]:
            return "" if row is None else row["note"]
        return f"{row['milliseconds']['forward']:.3f} / {row['milliseconds']['both']:.3f}"

    rows = [[name, *(cell(found.get((name, L))) for L in lengths)] for name in dict.fromkeys(name for name, _ in found)]
    return "\n\n".join([table(["forward / both, ms", *(f"{L:,}" for L in lengths)], rows), made(result)])


class Goal(NamedTuple):
    """Something to reach: what is measured, from which record, and the number; `most`: it is an upper bound."""

    what: str
    record: str
    wanted: float
    measured: Callable[[Result], float]
    most: bool = False


def of_case(name: str, key: str) -> Callable[[Result], float]:
    return lambda result: float(result["cases"][name][key])


def least_fraction(order: int, which: str, lengths: tuple[int, ...]) -> Callable[[Result], float]:
    return lambda result: min(by_length(result, order)[L][f"{which}_fraction"] for L in lengths)


def behind_peer(result: Result) -> float:
    """The least lead over the peer's column, forward."""
    rows = by_length(result, 2)
    return min(rows[L]["forward_fraction"] - PEER[L][0] for L in PEER)


def folded(width: int, what: str, least: int) -> Callable[[Result], float]:
    return lambda result: min(
        row[what]["projections"] / row[what]["folded"]
        for row in result["rows"]
        if row["C"] == width and row["L"] >= least
    )


def most_host(which: int) -> Callable[[Result], float]:
    return lambda result: max(x["repeated"][which] - x["repeated"][which + 2] for x in result["calls"].values())


def slower(found: str, beside: str, what: str) -> Callable[[Result], float]:
    """How many times as long one case takes as another."""
    return lambda result: float(result["cases"][found][what] / result["cases"][beside][what])


def slowest_start(which: int) -> Callable[[Result], float]:
    return lambda result: max(max(found[which]) for found in result["calls"].values())


LONG = (1568, 4096, 16384, 65536)
C = "gpu_called"
GOALS = [
    Goal("clusters, 16,384 tokens, forward, times softmax", C, 15, of_case("cluster", "forward_times")),
    Goal("the same, step", C, 12, of_case("cluster", "step_times")),
    Goal("65,536 tokens, forward", C, 40, of_case("long", "forward_times")),
    Goal("4 heads of 96, 65,536 tokens, forward", C, 18, of_case("grid 64k", "forward_times")),
    Goal("the same in 256 clusters of 256", C, 18, of_case("grid 64k, 256", "forward_times")),
    Goal("4,096 tokens, forward", C, 1, of_case("4k", "forward_times")),
    Goal("4 heads of 96, 4,096 tokens, forward", C, 1, of_case("grid 4k", "forward_times")),
    Goal("masked, forward", C, 10, of_case("masked", "forward_times")),
    Goal("masked, step", C, 8, of_case("masked", "step_times")),
    Goal("causal clusters, forward", C, 10, of_case("causal 64", "forward_times")),
    Goal("causal clusters, step", C, 8, of_case("causal 64", "step_times")),
    Goal("the same with `near=2`, forward", C, 10, of_case("causal near", "forward_times")),
    Goal("the same with `near=2`, step", C, 8, of_case("causal near", "step_times")),
    Goal("k-means, B 8, forward, times the time of blocks", C, 1.3, slower("kmeans, B 8", "far only", "forward"), True),
    Goal("the same, step", C, 1.3, slower("kmeans, B 8", "far only", "step"), True),
    Goal("k-means with `near=2`, B 8, forward", C, 1.3, slower("kmeans near, B 8", "cluster", "forward"), True),
    Goal("the same, step", C, 1.3, slower("kmeans near, B 8", "cluster", "step"), True),
    Goal("k-means, B 1, forward", C, 1.3, slower("kmeans", "blocks", "forward"), True),
    Goal("the same, step", C, 1.3, slower("kmeans", "blocks", "step"), True),
    Goal("order 2, B 256, 64 tokens, forward, from Python", C, 1, of_case("order 2, 64", "forward_called_times")),
    Goal("the same, step", C, 1, of_case("order 2, 64", "step_called_times")),
    Goal("order 3, B 256, 64 tokens, forward, from Python", C, 1, of_case("order 3, 64", "forward_called_times")),
    Goal("the same, step", C, 1, of_case("order 3, 64", "step_called_times")),
    Goal("order 2, fraction forward, from 1,568 on", "gpu_dense", 0.92, least_fraction(2, "forward", LONG)),
    Goal("order 2, fraction forward less the peer's, at worst", "gpu_dense", 0, behind_peer),
    Goal("order 2, fraction forward at 197", "gpu_dense", 0.80, least_fraction(2, "forward", (197,))),
    Goal("order 2, fraction backward at 197", "gpu_dense", 0.78, least_fraction(2, "backward", (197,))),
    Goal("order 3, fraction forward at 197", "gpu_dense", 0.72, least_fraction(3, "forward", (197,))),
    Goal("order 3, fraction backward at 197", "gpu_dense", 0.66, least_fraction(3, "backward", (197,))),
    Goal("order 3, fraction forward, from 1,568 on", "gpu_dense", 0.82, least_fraction(3, "forward", LONG)),
    Goal("order 3, fraction backward, from 1,568 on", "gpu_dense", 0.80, least_fraction(3, "backward", LONG)),
    Goal("causal, 16,384, order 2, both passes, ms", C, 1.0, of_case("causal 2, 16k", "step"), True),
    Goal("causal, 16,384, order 3, both passes, ms", C, 2.2, of_case("causal 3, 16k", "step"), True),
    Goal("folded, width 768, from 16,384, forward, x projections", "fold-cuda", 1.8, folded(768, "forward_ms", 16384)),
    Goal("the same, step", "fold-cuda", 2.0, folded(768, "step_ms", 16384)),
    Goal("folded, width 384, from 1,568, forward", "fold-cuda", 1.8, folded(384, "forward_ms", 1568)),
    Goal("the same, step", "fold-cuda", 2.0, folded(384, "step_ms", 1568)),
    Goal("host, forward, microseconds more than SDPA", "gpu_host", 25, most_host(0), True),
    Goal("host, step, microseconds more than SDPA", "gpu_host", 25, most_host(1), True),
    Goal("first call, a pass, seconds, empty cache", "gpu_first_call", 10, slowest_start(0), True),
    Goal("first call, a pass, seconds, full cache", "gpu_first_call", 1, slowest_start(1), True),
    Goal("GPU suite, tests failed", "gpu_tests", 0, lambda r: sum(x["failed"] for x in r["files"].values()), True),
    Goal("GPU suite, seconds", "gpu_tests", 480, lambda r: r["seconds"], True),
]  # fmt: skip


def goals_block(results: Mapping[str, Result]) -> str:
    """Each goal with what was reached."""
    rows = []
    for goal in GOALS:
        try:
            found = goal.measured(results[goal.record])
        except (KeyError, StopIteration, ValueError):
            rows.append([goal.what, _bound(goal), "not measured", ""])
            continue
        reached = found <= goal.wanted if goal.most else found >= goal.wanted
        rows.append([goal.what, _bound(goal), f"{found:.3g}", "yes" if reached else "**no**"])
    return table(["goal", "wanted", "measured", "reached"], rows)


def _bound(goal: Goal) -> str:
    return f"{'at most' if goal.most else 'at least'} {goal.wanted:g}"


def blocks(results: Mapping[str, Result]) -> dict[str, str]:
    """The blocks of the page by name."""
    single = {
        "gpu_called": called_block, "gpu_dense": dense_block, "gpu_host": host_block, "gpu_first_call": first_block,
        "gpu_public": public_block, "gpu_tests": tests_block, "gpu_speed": bench_block,
        "gpu_profile": profile_block,
    }  # fmt: skip
    made_of = {name: (name, block) for name, block in single.items()}
    made_of |= {"gpu_calls": ("gpu_called", calls_block), "gpu_tests_in_all": ("gpu_tests", tests_in_all)}
    found = {name: block(results[of]) if of in results else "Not run yet." for name, (of, block) in made_of.items()}
    several = {"speed_front": front_block, "gpu_more": more_block, "gpu_goals": goals_block}
    return found | {name: block(results) for name, block in several.items()}
