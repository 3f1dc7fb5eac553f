"""Whether every causal class of transformers stays causal under `set_attn_implementation("cumulant3")`, by running it.

    python -m tools.causal_walk --out benchmarks/results/causal_walk.json
    python -m tools.causal_walk --names NllbMoeForConditionalGeneration
    python -m tools.causal_walk --attention cluster4+block=2+sinks=2 --padded

Tiny configurations, random weights, unpadded input (or some texts padded left and right): the last token is exchanged,
and no earlier logit may move by more than under the model's own eager attention. `outcome` is "causal", "leak",
"refused" (an error of this library or of transformers says that the class does not take the name) or "not run" (the
tiny model does not run as it is).
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from .survey import said
from .tiny_models import WORDS, classes, tiny_model

MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES")
LENGTH, ROUNDING = 12, 1e-4  # tokens; of logits of the order of 1


def names() -> list[str]:
    """The causal classes of the installed transformers."""
    return list(dict.fromkeys(name for mapping in MAPPINGS for name in classes(mapping)))


def moved(model: Any, padded: bool = False) -> float:
    """How far the last token moves the logits before it: max |difference|, over a batch of four texts.

    `padded`: the second text is padded on the left and the third on the right; their logits there do not count.
    """
    import torch

    ids = torch.randint(5, WORDS // 2, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, -1] = WORDS // 2 - 1 - other[:, -1]
    there = torch.ones_like(ids)
    if padded:
        there[1, :3] = there[2, -3:] = 0
    both = bool(getattr(model.config, "is_encoder_decoder", False))
    masks = {"decoder_attention_mask" if both else "attention_mask": there} if padded else {}
    logits = []
    for given in (ids, other):
        batch = {"input_ids": ids, "decoder_input_ids": given} if both else {"input_ids": given}
        torch.manual_seed(0)  # for layers that draw
        with torch.no_grad():
            logits.append(model(**batch, **masks, use_cache=False).logits)
    apart = (logits[0] - logits[1]).masked_fill(there[:, :, None] == 0, 0.0)
    return float(apart[:, :-1].abs().max())


def looked_at(name: str, attention: str = "cumulant3", padded: bool = False) -> dict[str, Any]:
    """What became of one class."""
    import transformers

    try:
        kind = getattr(transformers, name)
        decoder = {"is_decoder": True} if hasattr(kind.config_class, "is_decoder") else {}
        model = tiny_model(kind, initializer_range=0.2, **decoder)
        model.set_attn_implementation("eager")
        eager = moved(model, padded)
    except Exception as error:
        return {"outcome": "not run", "reason": said(error)}
    try:
        model.set_attn_implementation(attention)
        found = moved(model, padded)
    except Exception as error:
        return {"outcome": "refused", "reason": said(error), "eager": eager}
    return {"outcome": "causal" if found <= eager + ROUNDING else "leak", "moved": found, "eager": eager}


def main() -> int:
    import transformers

    import cumulant
    from cumulant.bench.provenance import provenance

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*", help="only these")
    parser.add_argument("--attention", default="cumulant3", help="name, with options")
    parser.add_argument("--padded", action="store_true", help="with texts that are padded")
    parser.add_argument("--out", type=Path, help="file of the record")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    cumulant.register_transformers(given.attention)
    found = {}
    for name in given.names or names():
        found[name] = looked_at(name, given.attention, given.padded)
        print(f"{name:45} {found[name]}", flush=True)
    counts = dict(Counter(one["outcome"] for one in found.values()).most_common())
    print(counts)
    if given.out is not None:
        asked = f" --attention {given.attention}" * (given.attention != "cumulant3") + " --padded" * given.padded
        known = provenance(f"python -m tools.causal_walk{asked}")
        known["versions"]["transformers"] = transformers.__version__
        given.out.write_text(json.dumps({**known, "summary": counts, "classes": found}, indent=1) + "\n")
    return 1 if "leak" in counts else 0


if __name__ == "__main__":
    sys.exit(main())
