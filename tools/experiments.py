"""The experiments of docs/lab/results.md: what they are, their records, and the pages made from them.

    python -m tools.experiments                      # write the pages and their figures anew from the records
    python -m tools.experiments --list               # name, runs done, command
    python -m tools.experiments --add runs/digits    # take over records: a folder of `cumulant reproduce`,
                                                          # a folder of records, or a results.json

Records lie in benchmarks/results/experiments, one file per experiment and one run per line. Training itself is
`cumulant reproduce` with the command shown, given the folder of the data: `--data FOLDER/tiny-imagenet-100`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cumulant.studies.command import Reproduce
from cumulant.studies.plan import Key
from cumulant.studies.records import by_name, key_of, read_records
from cumulant.studies.training import key_by_name
from tools.tables import fill, in_order, overview, planned, study_block

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results" / "experiments"
OVERVIEW, PAGE = ROOT / "docs" / "results.md", ROOT / "docs" / "lab" / "results.md"  # one line a study; every run
FIGURES = ROOT / "docs" / "figures"

TINY, PATCH4 = "tiny-imagenet-100", "tiny-imagenet-100-patch4"
MUON = "optimizer=muon"  # what makes softmax train well at this length; the main comparison is with AdamW


def at_rates(names: Sequence[str], rates: Sequence[str]) -> tuple[str, ...]:
    """Every mechanism at every learning rate."""
    return tuple(f"{name}+lr={rate}" for name in names for rate in rates)


FOUR = ("softmax", "linear", "cumulant2", "cumulant3")
SWEEP = (
    "softmax", "cumulant3", "cumulant3+normalization=sum", "cumulant3+qk_norm", "cumulant3+temperature=head",
    "cumulant3+temperature=order", "cumulant3+full", "cumulant3+around=mean", "cumulant3+v_conv", "cumulant3+gate",
    "cumulant3+pool=gap", "cumulant3+patch=4", "cumulant1", "softmax+qk_norm", "softmax+v_conv", "softmax+gate",
    "softmax+pool=gap", "softmax+patch=4", "cluster4", "cluster4+variance=full",
)  # fmt: skip
DIGIT_RATES = ("0.002", "0.005", "0.01", "0.02", "0.05")  # the recipe's is the first
# What the sweep found to help, together.
BEST = ("softmax+v_conv+pool=gap", "cumulant3+v_conv+pool=gap")
VIDEO = (*FOUR, *(f"{name}+variant=2" for name in FOUR), "softmax+variant=average")

EXPERIMENTS = {
    "digits": Reproduce(),
    "digits-muon": Reproduce(change=(MUON,)),
    "digits-rates": Reproduce(attention=at_rates((*FOUR, "softmax+qk_norm"), DIGIT_RATES), seeds=3, control=0),
    "digits-rates-muon": Reproduce(
        attention=at_rates(("softmax", "cumulant3", "softmax+gate", "cumulant3+gate"), DIGIT_RATES),
        seeds=3,
        control=0,
        change=(MUON,),
    ),
    "tiny-imagenet-100": Reproduce(data=TINY, attention=FOUR, seeds=3),
    "steps": Reproduce(data=TINY, attention=("softmax+batch_size=256+lr=0.001",), seeds=1, control=0),
    "optimizer": Reproduce(data=TINY, attention=("softmax",), seeds=1, control=0, change=(MUON,)),
    "sweep": Reproduce(data=TINY, attention=SWEEP, seeds=1, control=2, epochs=40, change=(MUON,)),
    "best": Reproduce(data=TINY, attention=BEST, seeds=3, control=0, epochs=40, change=(MUON,)),
    "patch4": Reproduce(data=TINY, recipe=PATCH4, attention=FOUR, seeds=1, control=0, change=(MUON,)),
    "clusters": Reproduce(data=TINY, attention=("softmax", "cluster4"), seeds=3),
    "clusters-patch4": Reproduce(
        data=TINY,
        recipe=PATCH4,
        attention=("softmax", "cluster16", "cluster16+variance=full"),
        seeds=3,
        control=1,
        change=(MUON,),
    ),
    "ucf101-6": Reproduce(data="ucf101-6", attention=VIDEO, seeds=3),
    "cifar10": Reproduce(data="cifar10", attention=FOUR, seeds=1, control=0, epochs=40, change=(MUON,)),
}

ABOUT = {
    "digits": "digits, AdamW, 20 epochs",
    "digits-muon": "digits, Muon, 20 epochs",
    "digits-rates": "digits, AdamW, five learning rates",
    "digits-rates-muon": "digits, Muon, five learning rates",
    "tiny-imagenet-100": "64 tokens, AdamW, 100 epochs",
    "steps": "batches of 256",
    "optimizer": "64 tokens, Muon, 100 epochs",
    "sweep": "one factor at a time, Muon, 40 epochs",
    "best": "convolution and mean pooling, Muon, 40 epochs",
    "patch4": "256 tokens, Muon, 40 epochs",
    "clusters": "four local blocks of 64 tokens, AdamW, 100 epochs",
    "clusters-patch4": "sixteen of 256 tokens, Muon, 40 epochs",
    "ucf101-6": "ViViT on UCF-101, six classes",
    "cifar10": "CIFAR-10, Muon, 40 epochs",
}


def kept() -> dict[Key, dict[str, Any]]:
    """All records of all experiments."""
    found, unreadable = read_records(RECORDS)
    if unreadable:
        raise SystemExit(f"not records of this version in {RECORDS}: {', '.join(unreadable)}")
    return by_name(found)


def add(places: list[Path]) -> None:
    """Take over the records of other folders and files; a run that is there already is replaced."""
    new: dict[Key, dict[str, Any]] = {}
    for place in places:
        if place.is_file():
            content = json.loads(place.read_text(encoding="utf-8"))
            several = content.get("runs", [content]) if isinstance(content, dict) else content
            new |= {key_of(record): record for record in several}
        else:
            folder = place / "records" if (place / "records").is_dir() else place
            new |= read_records(folder)[0]
    new = by_name(new)
    records = kept() | new
    RECORDS.mkdir(parents=True, exist_ok=True)
    for name, settings in EXPERIMENTS.items():
        own = in_order(records, [settings])
        if own:
            lines = ",\n".join(json.dumps(record, sort_keys=True, allow_nan=False) for record in own)
            (RECORDS / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    wanted = {key_by_name(one) for one in in_order(records, list(EXPERIMENTS.values()))}
    strange = [f"{one['configuration']} seed {one['seed']}" for key, one in new.items() if key not in wanted]
    print(f"{len(new) - len(strange)} runs taken over")
    if strange:
        print(f"not part of any experiment, left out: {', '.join(strange)}")


def pages() -> dict[Path, str]:
    """The two pages with the blocks that follow from the records."""
    records = kept()
    blocks = {name: study_block(settings, records) for name, settings in EXPERIMENTS.items()}
    for name in (name for name in blocks if (FIGURES / f"results-{name}.svg").exists()):
        shown = "Accuracy and spread of the maps against the rate" if "rates" in name else "Accuracy of every run"
        blocks[name] += f"\n![{shown}](../figures/results-{name}.svg)\n"
    table = {"overview": overview({ABOUT[name]: settings for name, settings in EXPERIMENTS.items()}, records)}
    return {
        page: fill(page.read_text(encoding="utf-8"), filled) for page, filled in ((OVERVIEW, table), (PAGE, blocks))
    }


def figures() -> None:
    """The figures of the studies that have something to compare."""
    from tools.experiment_figures import draw

    records = kept()
    for name, settings in EXPERIMENTS.items():
        if draw(settings, records, FIGURES / f"results-{name}.svg"):
            print(f"drew docs/figures/results-{name}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name, runs done and command of every experiment")
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="PLACE", help="take over records")
    choices = parser.parse_args()
    if choices.add:
        add(choices.add)
    if choices.list:
        records = kept()
        for name, settings in EXPERIMENTS.items():
            runs = planned(settings)
            print(f"{name:18} {sum(run.key in records for run in runs):3} of {len(runs):3}  {settings.command()}")
        return
    figures()
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
