"""Whether masks and caches of transformers mean to our attention what they mean to a model's own, class by class.

    python -m tools.mask_walk --out benchmarks/results/mask_walk.json
    python -m tools.mask_walk --names LlamaForCausalLM SplinterModel

Tiny configurations, random weights, and softmax itself under our names, so that nothing but the handling of masks can
differ from the model's "eager": `name` sets `attn_implementation="softmax"`, `converted` converts the model and gives
softmax back to every layer that was replaced. Compared are unpadded and padded texts, packed ones, user's masks of four
dimensions, cached chunks, beams and static caches (`CASES`). Of each case is kept "same", "differs" with the largest
difference over the largest logit, "refused" (an error of this library) or "raw error"; what the model's own attention
does not run is left out. "eager differs from itself" is a finding about transformers: ours differs there from "eager",
and "eager" with a cache from "eager" without one (`WITHOUT_CACHE`).
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .causal_walk import names as causal_names
from .survey import said
from .tiny_models import WORDS, classes, tiny_model

LENGTH, ROUNDING = 10, 1e-4
CHUNKS = ((0, 5), (5, 8), (8, 9), (9, 10))
Case = Callable[[Any], "Tensor | None"]


def _ids() -> Tensor:
    return torch.randint(5, WORDS // 2, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def _padding(left: int = 0, right: int = 0) -> Tensor:
    there = torch.ones(3, LENGTH, dtype=torch.long)
    there[1, :left] = 0
    there[2, LENGTH - right :] = 0
    return there


def _both(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _first(said: Any) -> Tensor:
    named = (getattr(said, name, None) for name in ("logits", "last_hidden_state"))
    return next((x for x in named if x is not None), said[0])


def plain(model: Any) -> Tensor:
    more = {"decoder_input_ids": _ids().flip(0)} if _both(model) else {}
    return _first(model(input_ids=_ids(), **more))


def padded(model: Any) -> Tensor:
    there = _padding(3, 4)
    more = {"decoder_input_ids": _ids().flip(0), "decoder_attention_mask": there} if _both(model) else {}
    return _first(model(input_ids=_ids(), attention_mask=there, **more))[there.bool()]


def packed(model: Any) -> Tensor | None:
    """Two texts in a row, told by their positions alone; two rows with other lengths."""
    places = torch.stack([torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in (4, 7)])
    more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return None if _both(model) else _first(model(input_ids=_ids()[:2], position_ids=places, **more))


def _four(model: Any, seen: Tensor, rows: Tensor) -> Tensor | None:
    if _both(model):
        return None
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return _first(model(input_ids=_ids(), attention_mask=bias))[rows]


def causal_of_user(model: Any) -> Tensor | None:
    """A causal mask with padding, made by the user."""
    there = _padding(3, 4).bool()
    return _four(model, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & there[:, None, None], there)


def prefix_of_user(model: Any) -> Tensor | None:
    """A mask of the user's in which the first four tokens see each other."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    seen[:4, :4] = True
    return _four(model, seen.expand(3, 1, -1, -1), torch.ones(3, LENGTH, dtype=torch.bool))


def cached(model: Any) -> Tensor | None:
    """A text in chunks, the others padded on the left; of an encoder-decoder the encoder's text is padded."""
    ids, there, rows = _ids(), _padding(3), []
    past: dict[str, Any] = {}
    more: dict[str, Any] = {}
    if _both(model):
        more["encoder_outputs"] = model.get_encoder()(input_ids=ids, attention_mask=there)
    for start, end in CHUNKS:
        named = "decoder_input_ids" if more else "input_ids"
        mask = there if more else there[:, :end]
        out = model(**{named: ids[:, start:end]}, attention_mask=mask, use_cache=True, **past, **more)
        if getattr(out, "past_key_values", None) is None:
            return None
        past = {"past_key_values": out.past_key_values}
        rows.append(_first(out))
    made = torch.cat(rows, 1)
    return made if more else made[there.bool()]


def whole(model: Any) -> Tensor:
    """What `cached` says where a cache changes nothing: the text at once."""
    there = _padding(3)
    more = {"decoder_input_ids": _ids()} if _both(model) else {}
    said = _first(model(input_ids=_ids(), attention_mask=there, **more))
    return said if more else said[there.bool()]


def _generated(model: Any, **how: Any) -> Tensor | None:
    if not hasattr(model, "generate") or not model.can_generate():
        return None
    shared = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    asked = {"input_ids": _ids()[:, :6], "attention_mask": _padding(3)[:, :6]}
    out = model.generate(**asked, **shared, return_dict_in_generate=True, output_logits=True, **how)
    return torch.cat([x.flatten() for x in out.logits])


def beams(model: Any) -> Tensor | None:
    return _generated(model, num_beams=3)


def static(model: Any) -> Tensor | None:
    return _generated(model, cache_implementation="static", disable_compile=True)


def example(model: Any) -> Tensor | None:
    """Inputs that were found for the class, where a mask is among them with the last sequence padded."""
    from cumulant.inspect.batches import call, tensors
    from cumulant.inspect.examples import example_for

    given = example_for(model)
    if isinstance(given, dict):
        given = {name: x.clone() for name, x in given.items()}
        for name, x in given.items():
            if "attention_mask" in name and x.ndim == 2 and x.shape[1] > 8:
                x[-1, -4:] = 0
    out = next(iter(tensors(call(model, given)).values()))
    return out[:, 0] if out.ndim == 3 else out


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (plain, padded, packed, causal_of_user, prefix_of_user, cached, beams, static, example)
}


WITHOUT_CACHE: dict[str, Case] = {
    "cached": whole,
    "beams": partial(_generated, num_beams=3, use_cache=False),
    "static": partial(_generated, use_cache=False),
}


def looked_at(name: str) -> dict[str, Any]:
    """What became of one class, by case: of `name` and of `converted`."""
    import transformers

    try:
        kind = getattr(transformers, name)
        causal = {"is_decoder": True} if "Causal" in name and hasattr(kind.config_class, "is_decoder") else {}
        model = tiny_model(kind, initializer_range=0.2, **causal)
        model.set_attn_implementation("eager")
    except Exception as error:
        return {"not built": said(error)}
    ran = {case: _ran(model, run) for case, run in CASES.items()}
    wanted = {case: x for case, x in ran.items() if isinstance(x, Tensor) and bool(x.isfinite().all())}
    unsure = {case for case in WITHOUT_CACHE.keys() & wanted if _unsure(model, case, wanted[case])}
    found: dict[str, Any] = {}
    for way, put in (("name", _by_name), ("converted", _converted)):
        try:
            put(model)
        except Exception as error:
            found[way] = said(error)
        else:
            found[way] = {case: _compared(_ran(model, CASES[case]), x, case in unsure) for case, x in wanted.items()}
        model.set_attn_implementation("eager")
    return found


def _by_name(model: Any) -> None:
    model.set_attn_implementation("softmax")


def _converted(model: Any) -> None:
    from cumulant.conversion import convert
    from cumulant.nn.swapped.choice import KEPT
    from cumulant.nn.swapped.hf import TAG

    convert(model, force=True)
    for module in model.modules():
        if hasattr(module, TAG):
            setattr(module, TAG, KEPT)


def _unsure(model: Any, case: str, wanted: Tensor) -> bool:
    """Whether the model's own attention says something else without a cache."""
    alone = _ran(model, WITHOUT_CACHE[case])
    return isinstance(alone, Tensor) and _compared(alone, wanted) != "same"


def _ran(model: Any, run: Case) -> Tensor | Exception | None:
    torch.manual_seed(0)  # for layers that draw
    try:
        with torch.no_grad():
            return run(model)
    except Exception as error:
        return error


def _compared(got: Tensor | Exception | None, wanted: Tensor, unsure: bool = False) -> str:
    """The outcome of a case; `unsure`: what was wanted is not what the model says without a cache."""
    import cumulant

    if isinstance(got, Exception):
        last = traceback.extract_tb(got.__traceback__)[-1].filename
        ours = Path(cumulant.__file__).parent in Path(last).parents and isinstance(got, ValueError | RuntimeError)
        return f"{'refused' if ours else 'raw error'}: {said(got)}"
    if got is None or got.shape != wanted.shape:
        return f"differs in shape: {None if got is None else tuple(got.shape)} for {tuple(wanted.shape)}"
    apart = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)) if wanted.numel() else 0.0
    if apart <= ROUNDING:
        return "same"
    return f"eager differs from itself: {apart:.1e}" if unsure else f"differs: {apart:.1e}"


def _outcomes(found: dict[str, Any]) -> Iterator[str]:
    for ways in found.values():
        for way in ("name", "converted"):
            for case in ways[way].values() if isinstance(ways.get(way), dict) else ():
                yield f"{way}: {case.partition(':')[0]}"


def main() -> int:
    import transformers

    import cumulant
    from cumulant.bench.provenance import provenance

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*", help="only these")
    parser.add_argument("--out", type=Path, help="file of the record")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    cumulant.register_transformers("softmax")
    found = {}
    for name in given.names or list(dict.fromkeys([*causal_names(), *classes()])):
        found[name] = looked_at(name)
        print(f"{name:45} {found[name]}", flush=True)
    counts = dict(Counter(_outcomes(found)).most_common())
    print(counts)
    if given.out is not None:
        known = provenance("python -m tools.mask_walk")
        known["versions"]["transformers"] = transformers.__version__
        given.out.write_text(json.dumps({**known, "summary": counts, "classes": found}, indent=1) + "\n")
    return 1 if any(one.partition(": ")[2].startswith(("differs", "raw error")) for one in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
