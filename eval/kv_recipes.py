"""What rounding keys and values costs, recipe by recipe, before one is built: KL against the exact cache.

Rounding happens inside attention.

    python eval/kv_recipes.py --model smollm2-135m --context 4096 --out eval/results/kv_recipes-smollm2-135m.json
    python eval/kv_recipes.py --only 'kivi*' --context 1024

One pass over each window; every query sees rounded keys and values except those of the newest ``recent`` tokens and of
the first ``first`` ones, which are exact, as a cache with a tail and sinks in 16 bits would have them. Keys that share
a scale along tokens are rounded when their tile has left the tail. Scales and minima are rounded to fp16 and counted:
``bits`` is per number, the exact tokens left out. KL over 768 positions per window.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quantkit
from quantkit.checkpoint.texts import load_text
from quantkit.evaluate.environment import hardware, versions

POSITIONS = 768
SHRINK = (0.9, 0.8, 0.7)


@dataclass(frozen=True)
class Side:
    """How keys or values are rounded.

    along: "channel" (one scale per channel over ``group`` tokens), "token" (per token over ``group`` channels) or
        "static" (one scale per channel from other text, clipped where the mean squared error is least).
    rotate: a Hadamard rotation of the head first.
    search: the group's range is shrunk from either end where that costs less.
    early: keys before rotary.
    mean: each channel's mean over the first 512 tokens is taken off first.
    """

    bits: int = 16
    along: str = "token"
    group: int = 64
    rotate: bool = False
    search: bool = False
    early: bool = False
    mean: bool = False

    def stored(self, head_dim: int) -> float:
        """Bits per number, fp16 scale and minimum of each group included."""
        if self.along == "static":
            return self.bits
        group = min(self.group, head_dim) if self.along == "token" else self.group
        return 16 if self.bits == 16 else self.bits + 32 / group


@dataclass(frozen=True)
class Recipe:
    keys: Side
    values: Side
    recent: int = 64
    first: int = 4


def channel(bits: int, group: int = 64, **more: Any) -> Side:
    return Side(bits, "channel", group, **more)


def token(bits: int, group: int = 64, **more: Any) -> Side:
    return Side(bits, "token", group, **more)


def static(bits: int) -> Side:
    return Side(bits, "static", 64, search=True)


EXACT = Side()
RECIPES = {
    "k4-channel": Recipe(channel(4), EXACT),
    "k4-channel-first0": Recipe(channel(4), EXACT, first=0),
    "k4-channel-early": Recipe(channel(4, early=True), EXACT),
    "k4-token": Recipe(token(4), EXACT),
    "k4-token-rotated": Recipe(token(4, rotate=True), EXACT),
    "k4-token-rotated-mean": Recipe(token(4, rotate=True, mean=True), EXACT),
    "v4-token": Recipe(EXACT, token(4)),
    "v4-token-rotated": Recipe(EXACT, token(4, rotate=True)),
    "kv8": Recipe(channel(8), token(8)),
    "kv8-token": Recipe(token(8), token(8), first=0),
    "kv4": Recipe(channel(4), token(4)),
    "kv4-rotated-values": Recipe(channel(4), token(4, rotate=True)),
    "kv4-searched": Recipe(channel(4, search=True), token(4, rotate=True, search=True)),
    "kv4-all-rotated": Recipe(token(4, rotate=True), token(4, rotate=True)),
    "k4v2": Recipe(channel(4, search=True), token(2, rotate=True, search=True)),
    "k4v2-g32": Recipe(channel(4, search=True), token(2, 32, rotate=True, search=True)),
    "kv3": Recipe(channel(3, search=True), token(3, rotate=True, search=True)),
    "kv2-g32": Recipe(channel(2, 32, search=True), token(2, 32, rotate=True, search=True), recent=128),
    "kv2-g64": Recipe(channel(2, search=True), token(2, rotate=True, search=True), recent=128),
    "kv8-static": Recipe(static(8), static(8)),
    "kv4-static": Recipe(static(4), static(4)),
    "k4-static": Recipe(static(4), EXACT),
    "v4-static": Recipe(EXACT, static(4)),
    "kv2-static": Recipe(static(2), static(2), recent=128),
    "kv2-g32-early": Recipe(
        channel(2, 32, search=True, early=True), token(2, 32, rotate=True, search=True), recent=128
    ),
    "kv2-g32-plain": Recipe(channel(2, 32, search=True), token(2, 32, search=True), recent=128),
    "k4v2-plain": Recipe(channel(4), token(2, search=True)),
    "k4v2-rotated": Recipe(channel(4), token(2, rotate=True, search=True)),
    "k3-channel": Recipe(channel(3), EXACT),
    "k3-channel-searched": Recipe(channel(3, search=True), EXACT),
    "k2-channel": Recipe(channel(2), EXACT, recent=128),
    "k2-channel-searched": Recipe(channel(2, search=True), EXACT, recent=128),
    "kv3-values-searched": Recipe(channel(3), token(3, rotate=True, search=True)),
    "kv3-plain": Recipe(channel(3, search=True), token(3, search=True)),
    "kivi2": Recipe(channel(2, 32), token(2, 32), recent=128, first=0),
    "kivi2-first4": Recipe(channel(2, 32), token(2, 32), recent=128),
    "kivi4": Recipe(channel(4, 32), token(4, 32), recent=128, first=0),
}


def hadamard(n: int) -> Tensor:
    """Orthonormal ``[n, n]``, n a power of two."""
    h = torch.ones(1, 1)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / math.sqrt(n)


def rounded(x: Tensor, side: Side) -> Tensor:
    """Groups along the last dimension, asymmetric, each with a scale and a minimum in fp16."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    top = (1 << side.bits) - 1

    def with_range(low: Tensor, high: Tensor) -> Tensor:
        scale, least = ((high - low) / top).clamp(min=1e-6).half().float(), low.half().float()
        return torch.round((x - least) / scale).clamp_(0, top) * scale + least

    best = with_range(low, high)
    if not side.search:
        return best
    error, span = (best - x).square().sum(-1, keepdim=True), high - low
    for shrink in SHRINK:
        for left, right in ((0.5, 0.5), (1.0, 0.0), (0.0, 1.0)):
            tried = with_range(low + left * (1 - shrink) * span, high - right * (1 - shrink) * span)
            cost = (tried - x).square().sum(-1, keepdim=True)
            best, error = torch.where(cost < error, tried, best), torch.minimum(cost, error)
    return best


def half_turn(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def with_static_scales(x: Tensor, bits: int, sample: Tensor) -> Tensor:
    """One scale and minimum per channel: those that round ``sample`` with the least squared error.

    sample: ``[heads, tokens, dim]``.
    """
    low, high = sample.amin(1, keepdim=True), sample.amax(1, keepdim=True)
    top, best = (1 << bits) - 1, torch.full_like(low, torch.inf)
    chosen = [low, high]
    for left in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        for right in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
            centre = sample.mean(1, keepdim=True)
            ends = centre + (low - centre) * left, centre + (high - centre) * right
            scale = ((ends[1] - ends[0]) / top).clamp(min=1e-6)
            error = (
                (torch.round((sample - ends[0]) / scale).clamp_(0, top) * scale + ends[0] - sample)
                .square()
                .sum(1, keepdim=True)
            )
            chosen = [torch.where(error < best, new, old) for new, old in zip(ends, chosen, strict=True)]
            best = torch.minimum(error, best)
    scale = ((chosen[1] - chosen[0]) / top).clamp(min=1e-6)
    return torch.round((x - chosen[0]) / scale).clamp_(0, top) * scale + chosen[0]


def stored(x: Tensor, side: Side, angles: tuple[Tensor, Tensor], sample: Tensor) -> Tensor:
    """``[batch, heads, tokens, dim]`` as a cache would give it back.

    sample: of another text, ``[heads, tokens, dim]``.
    """
    if side.bits == 16:
        return x
    if side.along == "static":
        return with_static_scales(x, side.bits, sample)
    cos, sin = (a[:, None] for a in angles)
    if side.early:
        x = x * cos - half_turn(x) * sin
    mean = x[:, :, :512].mean(2, keepdim=True) if side.mean else 0.0
    turn = hadamard(x.shape[-1]) if side.rotate else None
    y = x - mean
    if turn is not None:
        y = y @ turn
    if side.along == "channel":
        missing = -y.shape[2] % side.group
        y = torch.cat([y, y[:, :, -1:].expand(-1, -1, missing, -1)], 2).transpose(2, 3)
        y = rounded(y.unflatten(-1, (-1, side.group)), side).flatten(-2).transpose(2, 3)[:, :, : x.shape[2]]
    else:
        y = rounded(y.unflatten(-1, (-1, min(side.group, y.shape[-1]))), side).flatten(-2)
    if turn is not None:
        y = y @ turn
    y = y + mean
    return y * cos + half_turn(y) * sin if side.early else y


class Attention:
    """Eager causal attention that reads rounded keys and values where the recipe's cache would hold such."""

    def __init__(self) -> None:
        self.recipe = Recipe(EXACT, EXACT)
        self.sampling = False

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None,
        sliding_window: int | None = None, **given: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        recipe, tokens = self.recipe, q.shape[2]
        if self.sampling:
            module.sample = (k[0, :, recipe.first :], v[0, :, recipe.first :])
        tile = recipe.keys.group if recipe.keys.along == "channel" else 1
        samples = module.sample if hasattr(module, "sample") else (k[0], v[0])
        kept = [
            stored(x, side, module.angles, sample)
            for x, side, sample in zip((k, v), (recipe.keys, recipe.values), samples, strict=True)
        ]
        kept += [k, v]
        cached_k, cached_v, k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in kept)
        at, out = torch.arange(tokens), torch.empty_like(q)
        for start in range(0, tokens, 256):
            stop = min(start + 256, tokens)
            begin = max(0, start - sliding_window) if sliding_window else 0
            now, then = at[start:stop, None], at[None, begin:stop]
            old = (then < (now + 1 - recipe.recent).clamp(min=0) // tile * tile) & (then >= recipe.first)
            seen = (then <= now) & (now - then < (sliding_window or tokens))
            part = q[:, :, start:stop]
            scores = torch.where(old, part @ cached_k[:, :, begin:stop].mT, part @ k[:, :, begin:stop].mT)
            p = (scores * (module.scaling if scaling is None else scaling)).masked_fill(~seen, -torch.inf).softmax(-1)
            out[:, :, start:stop] = (p * old) @ cached_v[:, :, begin:stop] + (p * ~old) @ v[:, :, begin:stop]
        return out.transpose(1, 2).contiguous(), None


def install(module: Any) -> Attention:
    """Make a model attend through ``Attention``; each attention module remembers its rotary angles."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = Attention()
    ALL_ATTENTION_FUNCTIONS.register("kv_recipes", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("kv_recipes", sdpa_mask)
    for layer in module.modules():
        if isinstance(getattr(layer, "k_proj", None), nn.Module):
            layer.register_forward_pre_hook(remember_angles, with_kwargs=True)
    module.set_attn_implementation("kv_recipes")
    return attention


def remember_angles(layer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    layer.angles = given["position_embeddings"]


class Judge:
    """Hidden states of the exact cache, and the distance of others from them."""

    def __init__(self, model: Any, ids: Tensor, calibration: Tensor) -> None:
        self.module, self.ids = model.module, ids
        self.attention = install(self.module)
        self.attention.sampling = True
        with torch.inference_mode():
            self.module.base_model(input_ids=calibration[None], use_cache=False)
        self.attention.sampling = False
        count = min(POSITIONS, ids.shape[1] - 1)
        self.chosen = [
            torch.randperm(ids.shape[1] - 1, generator=torch.Generator().manual_seed(i))[:count].sort().values
            for i in range(len(ids))
        ]
        self.exact = self.hidden(Recipe(EXACT, EXACT))

    def hidden(self, recipe: Recipe) -> list[Tensor]:
        self.attention.recipe = recipe
        with torch.inference_mode():
            return [
                self.module.base_model(input_ids=row[None], use_cache=False).last_hidden_state[0, chosen]
                for row, chosen in zip(self.ids, self.chosen, strict=True)
            ]

    @torch.inference_mode()
    def measure(self, recipe: Recipe) -> dict[str, float]:
        divergence, loss = [], []
        for i, found in enumerate(self.hidden(recipe)):
            targets = self.ids[i, self.chosen[i] + 1]
            for p, q, target in zip(self.exact[i].split(64), found.split(64), targets.split(64), strict=True):
                left, right = (torch.log_softmax(self.module.lm_head(x).float(), -1) for x in (p, q))
                divergence.append((left.exp() * (left - right)).sum(-1))
                loss.append((left - right).gather(1, target[:, None])[:, 0])
        kl, change = torch.cat(divergence), torch.cat(loss)
        return {
            "kl_mean": float(kl.mean()),
            "kl_median": float(kl.median()),
            "kl_p99": float(kl.quantile(0.99)),
            "ln_perplexity_change": float(change.mean()),
            "ln_perplexity_change_stderr": float(change.std() / math.sqrt(len(change))),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--data", default="wikipedia-sample")
    parser.add_argument("--only", default="*")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = quantkit.load(given.model, device="cpu", dtype="float32", kv_bits=16)
    ids, other = (
        torch.tensor(model.tokenizer(load_text(given.data, split=split).text, add_special_tokens=False)["input_ids"])
        for split in ("evaluation", "calibration")
    )
    judge = Judge(
        model, ids[: given.windows * given.context].view(given.windows, given.context), other[: given.context]
    )
    head_dim = int(getattr(model.module.config, "head_dim", None) or 64)
    record = {"model": given.model, "context": given.context, "windows": given.windows, "data": given.data}
    record |= {"positions": POSITIONS, "versions": versions(), "hardware": hardware()}
    held = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    asked = ("model", "context", "windows", "data", "positions")
    if held and any(held.get(key) != record[key] for key in asked):
        raise SystemExit(f"{given.out} holds rows of another measurement: name another --out")
    record, rows = {**record, **held}, held.get("rows", {})  # --only adds to them
    for name, recipe in RECIPES.items():
        if not fnmatch.fnmatch(name, given.only):
            continue
        begin = time.perf_counter()
        bits = (recipe.keys.stored(head_dim) + recipe.values.stored(head_dim)) / 2
        rows[name] = {"bits": round(bits, 4), **judge.measure(recipe), "recipe": asdict(recipe)}
        print(
            f"{name:24} {bits:6.3f} bits  KL {rows[name]['kl_mean']:.5f}  p99 {rows[name]['kl_p99']:.4f}  "
            f"ln ppl {rows[name]['ln_perplexity_change']:+.4f}  {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        if given.out:
            given.out.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
