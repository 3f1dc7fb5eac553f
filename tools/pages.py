"""The parts of the documentation that are made from results: `python -m tools.pages` writes them.

Results lie in benchmarks/results: zoo_gpu.json (benchmarks/gpu_zoo.py), zoo_efficiency*.json and zoo_train_RECIPE.json
(`cumulant bench efficiency` and `train`), cluster_error.json and error_pareto.json (benchmarks/cluster_error.py),
zoo_orderings.json (benchmarks/orderings.py), cluster_stream.json (benchmarks/cluster_stream.py), study_NAME.json (see
`tools.studies_page`), cab.json (`cumulant bench cab`), records/NAME.json (see `tools.records`), cpu.json
(benchmarks/cpu.py), class_tokens_digits.json (benchmarks/class_tokens.py), and those of the speed page
(benchmarks/gpu_all.py, see `tools.speed_page`). Pages hold places for them, between `<!-- results: NAME -->` and
`<!-- end -->`; what has no file says that it was not run. The figures of README and of the first pages are drawn too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cumulant import studies
from cumulant.bench.cab import crossing_text
from cumulant.studies.heads import LAYERS
from tools.tables import fill

ROOT = Path(__file__).parents[1]
STUDIES = [
    name for name in studies.names() if name not in ("cumulant-vit", "mechanisms", "heads")
]  # those that measure, each with a page; those of the layers share one
Result = Mapping[str, Any]
COMMANDS = {
    "zoo_gpu": "PYTHONPATH=src python benchmarks/gpu_zoo.py",
    "zoo_efficiency": "cumulant bench efficiency --time-limit 0.1",
    "zoo_efficiency_cpu": "OMP_NUM_THREADS=1 cumulant bench efficiency",
    "zoo_train_digits": "cumulant bench train --control 4\n"
    "cumulant bench train --control 4 --seeds 5 --attention softmax linear flow mala agent agent+conv=false \\\n"
    "    agent+agents=16 focused_linear focused_linear+use_conv=false rala rala+use_gate=false \\\n"
    "    rala+use_alpha=false rala+use_alpha=false+use_gate=false",
    "zoo_train_tiny-imagenet-100": "cumulant bench train --recipe tiny-imagenet-100 --data FOLDER --epochs 50",
    "error_pareto": "python benchmarks/cluster_error.py --parts pareto --model MODEL --reviews REVIEWS \\\n"
    "    --vit CHECKPOINT --images FOLDER",
    "cluster_error": "python benchmarks/cluster_error.py --model MODEL --reviews REVIEWS",
    "cluster_stream": "python benchmarks/cluster_stream.py",
    "around_mean": "python benchmarks/around_mean.py CHECKPOINT IMAGES",
}


def origin(result: Result) -> str:
    """Where a result came from, in a line."""
    machine = result.get("device") or result["machine"].get("gpu") or result["machine"]["processor"]
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("python", "torch"))
    return f"Commit {result['commit']}, {machine}, {versions}, {result['date']}."


def origins(result: Result) -> list[str]:
    """As `origin`, a line for each visit where rows of several were put together."""
    visits: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        when = row.get("date", result["date"]), row.get("commit", result["commit"])
        visits.setdefault(when, []).append(row["case"])
    if len(visits) == 1:
        return [origin(result)]
    return [
        f"{origin({**result, 'date': date, 'commit': commit})} Measured then: {'; '.join(cases)}."
        for (date, commit), cases in sorted(visits.items())
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def train_block(result: Result) -> str:
    """Ranking with costs, the A/A spread and what became of the claims."""
    rows = []
    mixed = len({row["seeds"] for row in result["ranking"]}) > 1
    for row in result["ranking"]:
        beyond = " (beyond)" if row["beyond_chance"] else ""
        seeds = f" ({row['seeds']})" if mixed else ""
        rows.append([
            f"`{row['variant']}`", f"{100 * row['mean']:.2f}{seeds}", f"{row['difference']:+.2f}{beyond}",
            f"{row['parameters']:,}", f"{row['flops'] / 1e6:,.2f}",
            "-" if row["throughput"] is None else f"{row['throughput']:,.0f}",
            "-" if row["step_bytes"] is None else f"{row['step_bytes'] / 2**20:,.1f}",
        ])  # fmt: skip
    control = result["control"]
    base = result["baseline"]
    said = (
        f"`{result['model']}` on {result['data']}, {result['epochs']} epochs, "
        f"seeds per mechanism{' in brackets' if mixed else ': ' + str(result['seeds'])}. "
        f"A/A: {control['runs']} runs of {base} from {100 * control['low']:.2f} to {100 * control['high']:.2f} %, a "
        f"spread of {control['spread']:.2f} points; one test item is {100 / result['test_items']:.2f}."
    )
    head = ["mechanism", "top-1, %", f"against {base}", "parameters", "MFLOP an item", "items/s", "step, MiB"]
    left = [f"Not run: {', '.join(result['missing'])}."] if result.get("missing") else []
    failed = [f"Failed: `{name}`: {why}" for name, why in result["failed"].items()]
    return "\n\n".join([said, table(head, rows), *left, *failed, origin(result)])


GPU_TIMES = (
    "Ours / public. Milliseconds are those of the device: each call is recorded as a CUDA graph, and that is timed. "
    "In brackets the ratio of single calls with their host time (guards of the compiler, autograd, dispatch of "
    "operators), which is most of a call that is over in 0.2 ms."
)


def gpu_block(result: Result) -> str:
    """Ours against the public formulation, compiled, by case."""
    rows = []
    for row in result["rows"]:
        if row["wrong"]:
            rows.append([row["case"], f"not timed: {row['wrong']}", *[""] * 5])
            continue
        cells = [row["case"]]
        for phase in ("forward", "both"):
            times = row["milliseconds"][phase]
            cells.append(f"{times['ours'][0]:.3f} / {times['public'][0]:.3f}")
            called = f"{row['called_ratio'][phase]:.2f}" if "called_ratio" in row else "-"
            cells.append(f"**{row['ratio'][phase]:.2f}** ({called})")
        memory = row["peak_bytes"]["both"]
        cells.append(f"{memory['ours'] / 2**20:,.0f} / {memory['public'] / 2**20:,.0f}")
        cells.append(f"{max(row['error'].values()):.0e} / {max(row['public_error'].values()):.0e}")
        rows.append(cells)
    ratio = "ratio (called)"
    head = ["case", "forward, ms", ratio, "with backward, ms", ratio, "MiB", "error, ours / public"]
    return "\n\n".join([GPU_TIMES, table(head, rows), *origins(result)])


def efficiency_block(result: Result) -> str:
    """Efficiency lengths against the fused kernel and the textbook formula."""
    by_key = {(c["name"], c["quantity"], c["phase"], c["opponent"]): c for c in result["crossings"]}
    columns = [(q, p, o) for q in ("time", "memory") for p in ("forward", "both") for o in ("naive", "fused")]
    names = list(dict.fromkeys(c["name"] for c in result["crossings"]))
    rows = [[f"`{name}`", *(crossing_text(by_key[name, *column]) for column in columns)] for name in names]
    head = ["mechanism", *(f"{q}, {'forward' if p == 'forward' else '+ backward'}, {o}" for q, p, o in columns)]
    notes = [*result["checks"], *(f"Not measured further: {n}: {w}." for n, w in result["given_up"].items())]
    return "\n\n".join([table(head, rows), *notes, origin(result)])


def pareto_block(result: Result) -> str:
    """For each model the mechanisms beside the best setting of the dial at the same cost or less."""
    parts = []
    for name, model in result["models"].items():
        rows = []
        for v in sorted(model["verdicts"], key=lambda v: v["cost"]):
            dial = "nothing as cheap" if v["dial"] is None else f"{v['dial_error']:.3f} ({v['dial']})"
            label = f"**`{v['mechanism']}`**" if v["better_than_dial"] else f"`{v['mechanism']}`"
            rows.append([label, f"{v['cost']:.3f}", f"{v['error']:.3f}", dial])
        better = [v["mechanism"] for v in model["verdicts"] if v["better_than_dial"]]
        verdict = (
            f"Better than the dial at their cost: {', '.join(better)}." if better else "None is better than the dial."
        )
        head = ["mechanism", "multiply-adds, of softmax", "error", "the dial at that cost or less"]
        parts.append(f"{name} ({model['layers']} layers, mean error). {verdict}\n\n{table(head, rows)}")
    return "\n\n".join([*parts, origin(result)])


def cluster_block(result: Result) -> str:
    """Errors by layer beside those of the page that the work began with, and the dial at 4,096 tokens."""
    rows = []
    for row in result["table"]:
        by_layer = [f"{x:.2f}" for x in row["error"]]
        off = "" if row["largest_deviation"] is None else f"{row['largest_deviation']:.0%}"
        if "outside_the_draws" in row:
            off += f" ({row['outside_the_draws']:.0%} outside four draws)"
        rows.append([row["method"].strip(), *by_layer, off])
    errors = table(["method", *map(str, range(6)), "off the first table"], rows)
    dial = [["error", *(f"{row['error']:.3f}" for row in result["dial"])]]
    dial.append(["multiply-adds, share of softmax", *(f"{row['cost']:.1%}" for row in result["dial"])])
    worst = max(row["error"] for row in result["dial"]), max(row["cost"] for row in result["dial"])
    said = f"At most {worst[0]:.3f} at no more than {worst[1]:.1%}."
    return "\n\n".join([
        "512 tokens, six reviews, layers 0 to 5:", errors,
        "4,096 tokens, the dial set for each head on three texts and measured on two others, the larger of each:",
        table(["layer", *map(str, range(6))], dial), said, origin(result),
    ])  # fmt: skip


def around_block(result: Result) -> str:
    """A trained model with its attention replaced: error of the layers and accuracy."""
    rows = []
    for row in result["rows"]:
        errors = row["errors"]
        mean = f"{sum(errors) / len(errors):.2f} ({min(errors):.2f} to {max(errors):.2f})"
        rows.append([row["setting"], mean, f"{row['top1']:.1%}"])
    said = f"{result['model']}; attention of all {len(result['rows'][0]['errors'])} layers replaced, nothing trained:"
    head = ["attention", "error, mean over layers (range)", f"top-1, {result['images']:,} test images"]
    return "\n\n".join([said, table(head, rows), origin(result)])


def stream_block(result: Result) -> str:
    """The first and the last tenth of each stream."""
    rows = []
    for stream, settings in result["streams"].items():
        for setting, tenths in settings.items():
            first, last = tenths[0], tenths[-1]
            errors = [row["relative_error"] for row in tenths]
            rows.append([
                stream, setting, f"{first['step_us']:,.0f} / {last['step_us']:,.0f}",
                f"{first['numbers_held']:,} / {last['numbers_held']:,}", f"{last['clusters']}",
                f"{min(errors):.3f} to {max(errors):.3f}", f"{last['tokens_weighed']:,.0f}",
            ])  # fmt: skip
    tokens = next(iter(next(iter(result["streams"].values())).values()))
    head = [
        "stream", "blocks of 64", f"us a step at {tokens[0]['tokens']:,} / {tokens[-1]['tokens']:,} tokens",
        "numbers held", "clusters", "error", "tokens weighed",
    ]  # fmt: skip
    return "\n\n".join([table(head, rows), origin(result)])


# Page, what it says, how it is tested here, and what judges it: a claim of `bench train`, or numbers of `orderings`.
Judge = str | Callable[[Result], str]


def _apart(kind: str, lower: str, higher: str) -> Callable[[Result], str]:
    """Whether all runs of `lower` are below all runs of `higher`."""

    def judge(result: Result) -> str:
        a, b = result[kind][lower], result[kind][higher]
        a, b = ([x] if isinstance(x, float) else x for x in (a, b))
        word = "confirmed" if max(a) < min(b) else "refuted" if min(a) > max(b) else "not resolved"
        return f"{word}: {_runs(a)} against {_runs(b)}"

    return judge


def _level(kind: str, first: str, second: str) -> Callable[[Result], str]:
    """Whether the runs of two overlap."""

    def judge(result: Result) -> str:
        a, b = result[kind][first], result[kind][second]
        word = "confirmed" if min(a) <= max(b) and min(b) <= max(a) else "refuted"
        return f"{word}: {_runs(a)} against {_runs(b)}"

    return judge


def _runs(values: Sequence[float]) -> str:
    return "/".join(f"{x:.3f}" for x in values)


def _flat(name: str, key: str) -> Callable[[Result], str]:
    def judge(result: Result) -> str:
        own, softmax = ([row[key] for row in result["decoding"][n]] for n in (name, "softmax"))
        word = "confirmed" if own[0] == own[-1] and softmax[-1] > 10 * softmax[0] else "refuted"
        return f"{word}: {own[0]:,} to {own[-1]:,}, softmax {softmax[0]:,} to {softmax[-1]:,}"

    return judge


def _late(result: Result) -> str:
    found = result["late layers"]
    chance = 2 * (2 * found["none"] * (1 - found["none"]) / 500) ** 0.5  # two standard errors of a difference
    gap = found["last"] - found["first"]
    word = "not resolved" if abs(gap) < chance else "confirmed" if gap > 0 else "refuted"
    return f"{word}: {found['none']:.1%} as trained; first three {found['first']:.1%}, last three {found['last']:.1%}"


COUNTED = "counted at 64 and 4,096 tokens"
TRAIN, TEXT = "`bench train`", "two-layer character model, 300 steps, bits a character, two seeds"
ORDERINGS: list[tuple[str, str, str, Judge]] = [
    ("linear", "softmax > linear in image classification", TRAIN, "softmax > linear"),
    ("linear", "a decoding step costs the same at every length, with softmax it grows", COUNTED,
     _flat("linear", "work")),
    ("cosformer", "cosformer below linear in language modelling", TEXT, _apart("language", "cosformer", "linear")),
    ("cosformer", "without the cosine it is worse", TEXT,
     _apart("language", "cosformer", "cosformer without the cosine")),
    ("focused_linear", "focused_linear > linear", TRAIN, "focused_linear > linear"),
    ("focused_linear", "with its convolution > without", TRAIN, "focused_linear > focused_linear+use_conv=false"),
    ("focused_linear", "focused_linear > softmax (as reported)", TRAIN, "focused_linear > softmax"),
    ("rala", "rala > focused_linear", TRAIN, "rala > focused_linear"),
    ("rala", "full > without the gate", TRAIN, "rala > rala+use_gate=false"),
    ("rala", "without the gate > without alpha", TRAIN, "rala+use_gate=false > rala+use_alpha=false"),
    ("rala", "without alpha > without both", TRAIN, "rala+use_alpha=false > rala+use_alpha=false+use_gate=false"),
    ("mala", "mala > linear", TRAIN, "mala > linear"),
    ("mala", "mala >= rala with the same gate, LePE and rotary", TRAIN, "mala >= rala"),
    ("flow", "flow > linear in classification", TRAIN, "flow > linear"),
    ("flow", "flow below linear in language modelling", TEXT, _apart("language", "flow", "linear")),
    ("agent", "agent > softmax", TRAIN, "agent > softmax"),
    ("agent", "with its convolution > without", TRAIN, "agent > agent+conv=false"),
    ("agent", "16 agents do about as well as 49", TRAIN, "agent+agents=16 >= agent"),
    ("combiner", "fixed below its direct part alone in language modelling", TEXT,
     _apart("language", "combiner, fixed", "own segment alone")),
    ("combiner", "log-sparse below the segment alone", TEXT,
     _apart("language", "combiner, log-sparse", "own segment alone")),
    ("combiner", "softmax is the best that it can be", TEXT, _apart("language", "softmax", "combiner, fixed")),
    ("aaren", "memory flat in decoding, the cache of softmax grows", COUNTED,
     _flat("aaren", "held")),
    ("aaren", "within noise of a causal transformer on small causal tasks", TEXT,
     _level("language", "aaren", "softmax")),
    ("aaren", "clearly worse than softmax in associative recall", "two-layer model trained on 8 key-value pairs",
     _apart("recall", "aaren", "softmax")),
    ("lla", "below softmax in regression from a prefix", "no training: 8 noisy linear maps in 1,024 tokens",
     _apart("regression", "lla", "softmax")),
    ("lla", "below a global ridge regression", "the same", _apart("regression", "lla", "global ridge")),
    ("hierarchical", "above flat softmax in text classification",
     "one layer over the words of 6,000 reviews (IMDB), frozen embeddings, accuracy, three seeds",
     _apart("documents", "softmax", "hierarchical")),
    ("hierarchical", "replacing late layers costs less than replacing early ones",
     "ViT trained with softmax, Tiny-ImageNet-100, 500 test images", _late),
]  # fmt: skip


def orderings_block(results: Mapping[str, Result]) -> str:
    """Every ordering of the pages, and what became of it; training on digits and on Tiny-ImageNet-100."""
    rows = []
    for page, says, how, judge in ORDERINGS:
        cells = ["", ""]
        if callable(judge):
            small = results.get("zoo_orderings")
            try:
                cells[0] = "not run yet" if small is None else judge(small)
            except KeyError:
                cells[0] = "not run yet"
        elif judge:
            cells = [_claim(results.get(f"zoo_train_{name}"), judge) for name in ("digits", "tiny-imagenet-100")]
        rows.append([f"[`{page}`]({page}.md)", says, how, *cells])
    head = ["mechanism", "ordering", "tested by", "on a CPU (digits, text, synthetic)", "Tiny-ImageNet-100"]
    return table(head, rows)


def _claim(result: Result | None, text: str) -> str:
    if result is None:
        return "not run yet"
    found = next((one for one in result["claims"] if one["claim"] == text), None)
    if found is None or found["outcome"] == "not tested":
        return "not tested"
    interval = found.get("interval")
    doubt = f"A/A {result['control']['spread']:.2f}" if interval is None else "{:+.2f} to {:+.2f}".format(*interval)
    return f"{found['outcome']} ({found['difference']:+.2f}, {doubt})"


def softmax_takes(result: Result, order: int, tokens: int = 16384) -> str:
    """How many times as long as ours, on two cores."""
    row = next(row for row in result["speed"] if (row["order"], row["L"]) == (order, tokens))
    return f"{row['softmax_over_ours']['ratio']:.{0 if tokens > 4096 else 1}f}"


def front_block(results: Mapping[str, Result]) -> str:
    """What stands below the figure of README."""
    from tools import plot_gpu

    said = []
    if {"gpu_dense", "gpu_called"} <= set(results):
        said.append(plot_gpu.caption(results["gpu_dense"], results["gpu_called"]))
    if "cpu" in results:
        made = f"`python benchmarks/cpu.py`, commit {results['cpu']['commit']}"
        times = softmax_takes(results["cpu"], 3)
        said.append(f"On two CPU cores, 16,384 tokens, a call takes 1/{times} of the time of softmax ({made}).")
    return "\n".join(said) or "Not run yet."


def cpu_block(result: Result) -> str:
    """What a call takes on two cores, beside the products that it needs; softmax is in the first table of the page."""
    lengths = list(dict.fromkeys(row["L"] for row in result["speed"]))
    rows = []
    for n in (2, 3):
        own = {row["L"]: row["over_products"] for row in result["speed"] if row["order"] == n}
        rows.append([f"order {n}, ms", *(f"{own[L]['ms']:.3g} ({own[L]['ratio']:.1f} x)" for L in lengths)])
    for n in (2, 3):  # with gradients, of which records before 18 November 2026 know nothing
        own = {row["L"]: row.get("step_over_products") for row in result["speed"] if row["order"] == n}
        if all(own.values()):
            rows.append([f"step of order {n}, ms", *(f"{own[L]['ms']:.3g} ({own[L]['ratio']:.1f} x)" for L in lengths)])
    return f"{table(['tokens', *(f'{L:,}' for L in lengths)], rows)}\n\n{origin(result)}"


def shared_block(result: Result) -> str:
    """How much slower a call becomes beside a busy process, against the products that it needs."""
    over = [row["over"] for row in result["rows"]]
    made = f"{len(over)} cases, two threads: `{result['command']}`, commit {result['commit']}"
    return (
        f"Beside a busy process a call is slowed down {min(over):.1f} to {max(over):.1f} times as much as the two\n"
        f"products `q @ (k^T @ v)` are ({made}, load of the machine {result['load'][0]:.0f})."
    )


def orders_block(result: Result) -> str:
    """What an order keeps, and what it costs on two cores."""
    kept = (
        "the mean of the values", "and the covariance of keys and values", "and the third cumulant, its diagonal",
    )  # fmt: skip
    cost = ["", *(f"1/{softmax_takes(result, order)}" for order in (2, 3))]
    names = ("1", "2", "3 (default)")
    head = ["`order`", "keeps", "cost, of softmax at 16,384 tokens (two CPU cores)"]
    return table(head, list(zip(names, kept, cost, strict=True)))


BLOCKS: dict[str, Callable[[Result], str]] = {
    "zoo_gpu": gpu_block, "zoo_efficiency": efficiency_block, "zoo_efficiency_cpu": efficiency_block,
    "zoo_train_digits": train_block,
    "zoo_train_tiny-imagenet-100": train_block, "error_pareto": pareto_block, "cluster_error": cluster_block,
    "cluster_stream": stream_block, "around_mean": around_block,
}  # fmt: skip
DRAWN = ("class_tokens_digits", "smollm2_cache", "captured_qkv")  # of which there are figures alone
SPEED = (  # records of benchmarks/gpu_all.py
    "gpu_called", "gpu_dense", "gpu_causal", "fold-cuda", "gpu_decode", "gpu_host", "gpu_first_call", "gpu_public",
    "gpu_tests", "gpu_speed", "gpu_profile",
)  # fmt: skip
PAGES = {
    "README.md": ("front",),
    "docs/index.md": ("front",),
    "docs/first.md": ("orders",),
    "docs/performance.md": (
        "speed_front", "gpu_calls", "cpu", "gpu_dense", "gpu_host", "gpu_first_call", "gpu_public", "gpu_tests_in_all",
    ),
    "docs/lab/speed.md": ("gpu_goals", "gpu_profile", "gpu_called", "gpu_more", "gpu_speed", "cpu_shared", "gpu_tests"),
    "docs/lab/benchmarks.md": (
        "error_pareto", "zoo_efficiency_cpu", "zoo_efficiency", "zoo_gpu", "zoo_train_digits",
        "zoo_train_tiny-imagenet-100",
    ),
    "docs/lab/local-cumulants.md": ("cluster_error", "cluster_stream"),
    "docs/zoo/cumulant.md": ("around_mean",),
    "docs/cab.md": ("cab", "cab_details"),
    "docs/studies/index.md": ("studies",),
    "docs/studies/expected.md": ("expected",),
    **{f"docs/studies/{name}.md": (f"study_{name}",) for name in STUDIES},
    "docs/studies/heads.md": tuple(f"study_{name}" for name in LAYERS),
    "docs/zoo/orderings.md": ("zoo_orderings",),
}  # fmt: skip


def read(repository: Path) -> dict[str, Result]:
    """The results that are there, by name."""
    folder = repository / "benchmarks" / "results"
    names = (*BLOCKS, "zoo_orderings", "cab", "cpu", "cpu_shared", *DRAWN, *SPEED)
    paths = {name: folder / f"{name}.json" for name in names}
    paths |= {f"study_{name}": folder / f"study_{name}.json" for name in (*STUDIES, *LAYERS)}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def written(repository: Path) -> dict[str, str]:
    """The pages as the results would have them."""
    from tools import cab_page, expected, records, speed_page, studies_page  # which take their tables from here

    results = read(repository)
    blocks = {
        name: f"```\n{COMMANDS[name]}\n```\n\n" + (block(results[name]) if name in results else "Not run yet.")
        for name, block in BLOCKS.items()
    }
    blocks["front"] = front_block(results)
    blocks["cpu"] = cpu_block(results["cpu"]) if "cpu" in results else "Not run yet."
    blocks["cpu_shared"] = shared_block(results["cpu_shared"]) if "cpu_shared" in results else "Not run yet."
    blocks["orders"] = orders_block(results["cpu"]) if "cpu" in results else "Not run yet."
    blocks["zoo_orderings"] = orderings_block(results)
    blocks["cab"] = cab_page.board(results) if "cab" in results else "Not run yet."
    blocks["cab_details"] = cab_page.details(results["cab"]) if "cab" in results else "Not run yet."
    blocks["studies"] = studies_page.overview(results)
    blocks |= speed_page.blocks(results)
    blocks["expected"] = expected.page(records.kept(repository / "benchmarks" / "results" / "records"), results)
    for name in (f"study_{study}" for study in (*STUDIES, *LAYERS)):
        blocks[name] = studies_page.block(results[name]) if name in results else "Not run yet."
    return {
        page: fill((repository / page).read_text(encoding="utf-8"), {name: blocks[name] for name in names})
        for page, names in PAGES.items()
    }


def main() -> None:
    from tools import front_figures, plot_gpu

    for page, text in written(ROOT).items():
        (ROOT / page).write_text(text, encoding="utf-8")
        print(page)
    results = read(ROOT)
    figures = ROOT / "docs" / "figures"
    plot_gpu.draw(results["gpu_dense"], results["gpu_called"], figures / "gpu_time.svg")
    for name, (record, draw) in front_figures.FIGURES.items():
        draw(results[record], figures / name)
    print("docs/figures:", ", ".join(("gpu_time.svg", *front_figures.FIGURES)))


if __name__ == "__main__":
    main()
