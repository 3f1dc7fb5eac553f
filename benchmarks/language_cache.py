"""Perplexity of a language model over 8,192 tokens of books where the cache holds a quarter to a sixteenth of them.

    PYTHONPATH=src:. python benchmarks/language_cache.py MODEL TEXT [TEXT ...] [--out FILE] [--time]

MODEL is the folder of `python -m tools.models smollm2` (or gemma3), or the parts of its GGUF file; TEXT a book
(`... moby-dick`) in plain text. Each text is cut into pieces of --length tokens, the token that begins a text first
where the tokenizer sets one; the first 64 tokens of a piece are answered exactly under every cache. Printed are
perplexity, how much it is above that of the whole cache (mean and standard error over pieces, of the logarithm), that
of the second half, and the numbers held. Layers that see a window of the text (Gemma's) keep it under every cache;
`memory` is of the other layers, `memory_in_all` of all. With --every 4 one token in four is scored. Stopped, it goes on
with the pieces that --out lacks. With --time and no TEXT a folder with no more than config.json will do: weights and
tokens are drawn, on which times do not depend.

| cache | what a query sees |
|---|---|
| whole | every token |
| window 1/n | the first 4 and the last tokens, as many as the share is |
| merged 1/n | `MergedCache`: as many places, those of late queries that are kept among them |
| blocks | `cluster64+block=16+recent=15+response=0`: moments of blocks of neighbours |
| order 2 | `cumulant2` |
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import convert
from cumulant.bench.provenance import provenance
from cumulant.conversion import MergedCache, MomentsCache

EXACT = 64
AT_ONCE = 512  # tokens given to a cache at once: it takes them in by 64 anyway, and a window of a layer stays short
SINKS = 4
BLOCKS = "cluster64+block=16+recent=15+response=0+sinks=0"


def load(path: list[Path]) -> tuple[Any, Any]:
    """Model and tokenizer from a folder, or from parts of a GGUF file."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if path[0].is_dir() and not list(path[0].glob("*.safetensors")):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path[0])).eval(), None
    if path[0].is_dir():
        return AutoModelForCausalLM.from_pretrained(path[0]).eval(), AutoTokenizer.from_pretrained(path[0])
    from tools import gguf, language

    return language.opened(gguf.read(*path))


def window(size: int) -> Callable[..., tuple[Tensor, None]]:
    """Attention for transformers' registry in which a query sees the first tokens and the last, `size` in all.

    A layer with a window of its own sees that instead, without the first tokens.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: Any = None, **rest: Any
    ) -> tuple[Tensor, None]:
        own = rest.get("sliding_window")
        return last_tokens(query, key, value, size if own is None else own, SINKS if own is None else 0, scaling), None

    return attend


def last_tokens(query: Tensor, key: Tensor, value: Tensor, size: int, sinks: int, scaling: Any) -> Tensor:
    """Causal softmax over the first `sinks` tokens and the last, `size` in all: (B, L, H, E). Cost: L size."""
    L, outs = query.shape[2], []
    for start in range(0, L, 512):
        rows = torch.arange(start, min(L, start + 512), device=query.device)[:, None]
        first = max(sinks, start - size)
        seen = torch.cat((torch.arange(min(sinks, L)), torch.arange(first, min(L, start + 512)))).to(query.device)
        allowed = (seen <= rows) & ((seen < sinks) | (seen > rows - (size - sinks)))
        here = query[:, :, start : start + 512]
        outs.append(
            F.scaled_dot_product_attention(
                here, key[:, :, seen], value[:, :, seen], attn_mask=allowed, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outs, 2).transpose(1, 2).contiguous()


def numbers_of(config: Any) -> tuple[int, int]:
    """Numbers that one layer keeps of a token, and how many layers keep all tokens."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return 2 * width * config.num_key_value_heads, sum(kind == "full_attention" for kind in kinds)


@torch.no_grad()
def losses(model: Any, ids: Tensor, every: int, cache: Any = None) -> Tensor:
    """-log p of tokens 1, 1 + every, ... of ids (B, L)."""
    parts = [ids] if cache is None else [ids[:, :EXACT], *ids[:, EXACT:].split(AT_ONCE, 1)]
    hidden = []
    for part in parts:
        said = model.model(part, use_cache=cache is not None, **({} if cache is None else {"past_key_values": cache}))
        hidden.append(said.last_hidden_state)
    rows, then = torch.cat(hidden, 1)[:, :-1:every], ids[:, 1::every]
    found = [
        F.cross_entropy(model.lm_head(part).flatten(0, 1).float(), next_.flatten(), reduction="none").view(next_.shape)
        for part, next_ in zip(rows.split(256, 1), then.split(256, 1), strict=True)
    ]
    return torch.cat(found, 1)


def caches(model: Any, length: int, every: int = 1) -> dict[str, Callable[[Tensor], tuple[Tensor, int]]]:
    """What is measured: ids -> (losses, numbers held for one piece)."""
    from transformers import AttentionInterface

    config = model.config
    token, growing = numbers_of(config)
    token *= growing

    def whole(ids: Tensor) -> tuple[Tensor, int]:
        if growing == config.num_hidden_layers:
            model.set_attn_implementation("sdpa")
            return losses(model, ids, every), token * length
        return windowed(length)(ids)  # the same, without a mask of L x L for the windows of layers

    def merged(tokens: int | list[int], **options: Any) -> Callable[[Tensor], tuple[Tensor, int]]:
        def run(ids: Tensor) -> tuple[Tensor, int]:
            cache = MergedCache(model, tokens, **options)
            found = losses(model, ids, every, cache)
            return found, sum(layer.numel() for layer in cache.layers if not layer.is_sliding) // len(ids)

        return run

    def windowed(tokens: int) -> Callable[[Tensor], tuple[Tensor, int]]:
        def run(ids: Tensor) -> tuple[Tensor, int]:
            AttentionInterface.register("window", window(tokens))
            model.set_attn_implementation("window")
            return losses(model, ids, every), token * tokens

        return run

    def converted(name: str) -> Callable[[Tensor], tuple[Tensor, int]]:
        def run(ids: Tensor) -> tuple[Tensor, int]:
            model.set_attn_implementation("sdpa")
            convert(model, name, force=True, data=ids[:1, :EXACT])
            try:
                cache = MomentsCache(model)
                model.model(ids[:1], past_key_values=cache)
                return torch.cat([losses(model, one, every) for one in ids.split(1)]), cache.numel()
            finally:
                convert.restore(model)

        return run

    found: dict[str, Callable[[Tensor], tuple[Tensor, int]]] = {"whole": whole}
    for share in (8, 4, 16):
        found[f"window 1/{share}"] = windowed(length // share)
        found[f"merged 1/{share}"] = merged(length // share)
    eighth = length // 8
    found |= {
        "merged 1/8, more late": merged([5 * eighth // 8] * 10 + [19 * eighth // 16] * 20),
        "merged 1/8, more early": merged([7 * eighth // 4] * 10 + [5 * eighth // 8] * 20),
        "merged 1/8, no sinks": merged(eighth, sinks=0),
        "merged 1/8, recent 512": merged(eighth, recent=512),
        "merged 1/8, no prior": merged(eighth, prior=0.0),
        "merged 1/8, last 64": merged(eighth, span=64),
        "order 2": converted("cumulant2"),
        "blocks": converted(BLOCKS),
    }
    return found


def measured(
    model: Any,
    pieces: Tensor,
    batch: int,
    every: int,
    names: list[str] | None,
    known: dict[str, Any],
    keep: Callable[[dict], None],
) -> None:
    """Perplexities, batch after batch of pieces; every line so far after each. `known`: lines of an earlier run."""
    length = pieces.shape[1]
    found = {name: torch.tensor(line["losses"], dtype=torch.float64) for name, line in known.items()}
    one, growing = numbers_of(model.config)
    windows = model.config.num_hidden_layers - growing
    beside = one * windows * (model.config.sliding_window - 1) if windows else 0
    for start in range(0, len(pieces), batch):
        ids = pieces[start : start + batch]
        for name, run in caches(model, length, every).items():
            if (names and name not in names and name != "whole") or len(found.get(name, ())) > start:
                continue
            began = time.perf_counter()
            try:
                found_losses, held = run(ids)
            except Exception as error:  # one that fails is said and does not end the others
                print(f"{name}: {type(error).__name__}: {error}"[:300], flush=True)
                continue
            half = found_losses[:, found_losses.shape[1] // 2 :]
            each = torch.stack((found_losses.mean(1), half.mean(1)), 1).double().cpu()
            found[name] = torch.cat((found[name], each)) if name in found else each
            above = found[name] - found["whole"][: len(found[name])]
            mean, error = above.mean(0), above.std(0, correction=min(1, len(above) - 1)) / math.sqrt(len(above))
            line = {
                "pieces": len(above),
                "perplexity": float(found[name][:, 0].mean().exp()),
                "above": math.expm1(float(mean[0])),
                "above_error": float(error[0]),
                "above_second_half": math.expm1(float(mean[1])),
                "above_second_half_error": float(error[1]),
                "worst_piece": math.expm1(float(above[:, 0].max())),
                "memory": held / (one * growing * length),
                "memory_in_all": (held + beside) / (one * growing * length + beside),
                "losses": found[name].tolist(),
            }
            keep({name: line})
            print(
                f"{name:26} {line['pieces']:3} pieces  {line['perplexity']:7.3f}  {100 * line['above']:+7.2f} % "
                f"± {100 * line['above_error']:.2f}  second half {100 * line['above_second_half']:+7.2f} % ± "
                f"{100 * line['above_second_half_error']:.2f}  memory {line['memory']:.4f}  "
                f"{time.perf_counter() - began:.1f} s",
                flush=True,
            )


@torch.no_grad()
def timed(model: Any, ids: Tensor, keep: Callable[[dict], None]) -> None:
    """Prefill of a piece and decoding after it, ms; peak memory beside the weights, MiB."""
    from transformers import DynamicCache

    def now() -> float:
        if ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def of(make: Callable[[], Any], implementation: str) -> dict[str, float]:
        model.set_attn_implementation(implementation)
        model(ids[:, :256], past_key_values=make(), logits_to_keep=1)
        gc.collect()
        if ids.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        spent = []
        for _ in range(3):
            cache = make()
            start = now()
            model(ids, past_key_values=cache, logits_to_keep=1)
            spent.append(now() - start)
        peak = torch.cuda.max_memory_allocated() - before if ids.is_cuda else 0
        kept = torch.cuda.memory_allocated() - before if ids.is_cuda else 0
        token, steps = ids[:, -1:], 32 if ids.is_cuda else 8
        for _ in range(4):
            model(token, past_key_values=cache)
        start = now()
        for _ in range(steps):
            model(token, past_key_values=cache)
        return {
            "prefill_ms": 1e3 * sorted(spent)[1],
            "token_ms": 1e3 * (now() - start) / steps,
            "peak_mib": peak / 2**20,
            "kept_mib": kept / 2**20,
        }

    from transformers import AttentionInterface

    MergedCache(model, 1024)  # registers "softmax"
    assert "softmax" in AttentionInterface().valid_keys()
    length = ids.shape[1]
    for batch in (1, 16) if ids.is_cuda else (1,):
        ids = ids[:1].expand(batch, -1).contiguous()
        for name, make, implementation in (
            ("whole", DynamicCache, "sdpa"),
            *((f"merged 1/{n}", lambda n=n: MergedCache(model, length // n), "softmax") for n in (8,)),
        ):
            line = of(make, implementation)
            keep({f"time {name}, batch {batch}": line})
            print(f"{name:12} batch {batch:2} " + "  ".join(f"{k} {x:.2f}" for k, x in line.items()), flush=True)


def _said(options: argparse.Namespace) -> str:
    """The command without the places of files."""
    given = {"length": options.length, "pieces": options.pieces, "batch": options.batch, "dtype": options.dtype}
    given |= {"every": options.every} if options.every > 1 else {}
    texts, timing = "TEXT " if options.texts else "", " --time" if options.time else ""
    return f"MODEL {texts}" + " ".join(f"--{k} {x}" for k, x in given.items()) + timing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", type=lambda text: [Path(part) for part in text.split(",")], help="folder, or parts,of,a.gguf"
    )
    parser.add_argument("texts", nargs="*", type=Path)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--pieces", type=int, default=16, help="of each text, spread over it")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--every", type=int, default=1, help="one token in so many is scored")
    parser.add_argument("--names", nargs="+", help="caches to measure; all unless given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--time", action="store_true", help="times in place of perplexities")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for path in (*options.model, *options.texts):
        if not path.exists():
            raise SystemExit(
                f"there is no {path}: python -m tools.models smollm2 gemma3 moby-dick makes models and text"
            )
    if not options.texts and not options.time:
        raise SystemExit("a perplexity needs a text: python -m tools.models moby-dick makes one; --time needs none")
    model, tokenizer = load(options.model)
    model.requires_grad_(False).to(options.device, getattr(torch, options.dtype))
    record: dict[str, Any] = {
        **provenance("benchmarks/language_cache.py " + _said(options)),
        "length": options.length,
        "dtype": options.dtype,
        "model": getattr(model.config, "model_type", ""),
    }
    earlier = json.loads(options.out.read_text()) if options.out is not None and options.out.exists() else {}

    def keep(line: dict, name: str) -> None:
        record.setdefault(name, {}).update(line)
        if options.out is not None:
            options.out.write_text(json.dumps(record, indent=1))

    if not options.texts:
        ids = torch.randint(model.config.vocab_size, (1, options.length), device=options.device)
        timed(model, ids, partial(keep, name="drawn"))
    for path in options.texts:
        ids = torch.tensor(tokenizer(path.read_text()).input_ids)
        begins = ids[0] == tokenizer.bos_token_id
        cut = options.length - int(begins)
        ids = ids[int(begins) :]
        whole = ids[: len(ids) // cut * cut].view(-1, cut)
        whole = F.pad(whole, (int(begins), 0), value=tokenizer.bos_token_id or 0).to(options.device)
        chosen = whole[torch.linspace(0, len(whole) - 1, min(options.pieces, len(whole))).long()]
        print(f"{path.stem}: {len(ids)} tokens, {len(chosen)} pieces of {options.length}", flush=True)

        if options.time:
            timed(model, chosen[:1], partial(keep, name=path.stem))
        else:
            known = earlier.get(path.stem, {})
            record[path.stem] = known
            measured(model, chosen, options.batch, options.every, options.names, known, partial(keep, name=path.stem))


if __name__ == "__main__":
    main()
