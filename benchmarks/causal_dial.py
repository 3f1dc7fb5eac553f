"""The dial on a causal language model: clusters of the past by an error target, and what they cost in loss.

    python benchmarks/causal_dial.py FOLDER            # FOLDER/input.txt, any text; about 7 minutes on two cores
    python benchmarks/causal_dial.py FOLDER --steps 20 --context 256     # that all of it runs

A Llama of 4 layers (width 128, 4 heads of 32) learns the bytes of the first nine tenths of the text; the dial is set
on eight pieces of them and measured on pieces of the last tenth: error of each layer, share of softmax's
multiply-adds, and the loss in nats a byte before and after conversion. Then the time of one more token after many, with
all keys kept and with streamed clusters. benchmarks/results/causal_dial.json has all.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from cumulant.bench import provenance
from cumulant.conversion import MomentsCache, choose_layers, convert

PEAK = 2e-3  # learning rate
TARGETS = (0.05, 0.1, 0.15, 0.25, 0.4)
RESULTS = Path(__file__).parent / "results" / "causal_dial.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--weights", type=Path, help="file of the trained weights, to go on from if it is there")
    chosen = parser.parse_args()
    text = torch.tensor(list((chosen.folder / "input.txt").read_bytes()), dtype=torch.long)
    cut = len(text) * 9 // 10
    model = fresh(chosen.context)
    if chosen.weights is not None and chosen.weights.exists():
        load_model(model, chosen.weights)
    else:
        train(model, text[:cut], chosen.steps)
        if chosen.weights is not None:
            save_model(model, str(chosen.weights))
    held = pieces(text[cut:], chosen.context, 16, seed=2)
    seen = pieces(text[:cut], chosen.context, 8, seed=1)
    before = loss(model, held)
    print(f"softmax: loss {before:.4f} nats a byte on held-out text")
    rows: list[dict[str, Any]] = []
    for target in TARGETS:
        dial = choose_layers(model, [{"input_ids": seen}], target=target, batches=1)
        print(dial)
        one = copy.deepcopy(model)
        if dial.plan:
            convert(one, layers=dial.plan, example={"input_ids": seen[:1]})
        cost = sum(layer.cost for layer in dial.layers.values()) / len(dial.layers)
        rows.append({"target": target, "cost": cost, "loss": loss(one, held), "dial": dial.to_json()})
        print(f"target {target}: {cost:.0%} of softmax's multiply-adds, loss {rows[-1]['loss'] - before:+.4f}\n")
    plain = {}
    for name in ("cumulant2", "cumulant3"):
        one = copy.deepcopy(model)
        convert(one, name, example={"input_ids": seen[:1]})
        plain[name] = loss(one, held)
        print(f"{name} in every layer: loss {plain[name] - before:+.4f}")
    windows = []
    for width in (16, 32, 64, 128, 256):
        share = sum(min(i + 1, width) for i in range(chosen.context)) / (chosen.context * (chosen.context + 1) / 2)
        windows.append({"width": width, "cost": share, "loss": loss(windowed(model, width), held)})
        print(f"the last {width} tokens alone: {share:.0%}, loss {windows[-1]['loss'] - before:+.4f}")
    decoding = [decode(length) for length in ((512, 2048, 8192) if chosen.steps >= 600 else (64,))]
    command = f"python benchmarks/causal_dial.py FOLDER --steps {chosen.steps} --context {chosen.context}"
    content = {
        "provenance": provenance(command),
        "softmax": before,
        "plain": plain,
        "windows": windows,
        "decoding": decoding,
        "rows": rows,
    }
    if chosen.steps >= 600:
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
        print(f"wrote {RESULTS}")


def fresh(context: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=context, **sizes)).eval()


def train(model: LlamaForCausalLM, text: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    for step in (bar := tqdm(range(steps), desc="training", unit="step")):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        batch = pieces(text, model.config.max_position_embeddings, 4, seed=1000 + step)
        found = model(input_ids=batch, labels=batch).loss
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{found.item():.3f}")


def windowed(model: LlamaForCausalLM, width: int) -> MistralForCausalLM:
    """The same weights with softmax over the last `width` tokens: what clusters of the past have to be better than."""
    names = ("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "head_dim")  # fmt: skip
    sizes = {name: getattr(model.config, name) for name in names}
    made = MistralForCausalLM(MistralConfig(**sizes, sliding_window=width)).eval()
    made.load_state_dict(model.state_dict())
    return made


@torch.no_grad()
def decode(length: int) -> dict[str, float]:
    """The time of one further token after so many, over that of softmax with all its keys; medians of 15."""
    model, ids = fresh(2 * length), torch.randint(256, (1, length), generator=torch.Generator().manual_seed(3))
    times = {"softmax": _next_token(model, ids, DynamicCache())}
    convert(model, "cluster4+block=32+recent=1+response=8+sinks=0", example={"input_ids": ids[:, :64]})
    times["all keys"] = _next_token(model, ids, DynamicCache())
    times["streamed"] = _next_token(model, ids, MomentsCache(model))
    ratios = {name: seconds / times["softmax"] for name, seconds in times.items() if name != "softmax"}
    said = ", ".join(f"clusters {name} {ratio:.2f}" for name, ratio in ratios.items())
    print(f"a token after {length:,}: {said} times as long as softmax")
    return {"length": length, **ratios}


def _next_token(model: LlamaForCausalLM, ids: Tensor, cache: Any) -> float:
    model(ids, past_key_values=cache)
    times = []
    for _ in range(15):
        start = time.perf_counter()
        model(ids[:, :1], past_key_values=cache)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def pieces(text: Tensor, length: int, count: int, *, seed: int) -> Tensor:
    """(count, length) pieces of the text at random places."""
    first = torch.randint(len(text) - length, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[i : i + length] for i in first.tolist()])


@torch.no_grad()
def loss(model: LlamaForCausalLM | MistralForCausalLM, batch: Tensor) -> float:
    """Mean loss of the second half of every piece, where the past is long."""
    half = batch.shape[1] // 2
    losses = []
    for piece in batch.split(4):
        logits = model(input_ids=piece).logits[:, half - 1 : -1]
        losses.append(F.cross_entropy(logits.flatten(0, 1), piece[:, half:].flatten()).item())
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main()
