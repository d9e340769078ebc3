"""``quantkit inspect SOURCE``"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click

from quantkit.cli.output import print_json, print_lines

EXPERT = re.compile(r"experts\.\d+")


@click.command()
@click.argument("source")
@click.option("--check", is_flag=True, help="Prove stepping and scaling folds on a small random twin.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(source: str, check: bool, as_json: bool) -> None:
    """Show what quantkit finds in SOURCE: architecture, decoder blocks, linears, sizes. Reads headers only;
    --check also builds a small random model of the same architecture and proves on it what a conversion relies on."""
    from quantkit.checkpoint.open import open_source
    from quantkit.runtime.layers.dense_source import stored_experts

    opened = stored_experts(open_source(source))
    data = _structure(opened) if opened.quantization() is None else _quantized(opened)
    proof = None
    if check:
        from quantkit.model.check import check_model

        proof = check_model(opened.config)
    if as_json:
        print_json(_json(data) if proof is None else {**_json(data), "check": proof.to_json()})
        return
    lines = [str(opened.path), *_lines(data)]
    if proof is not None:
        lines += _check_lines(proof)
    print_lines("\n".join(lines))


def _json(data: dict[str, Any]) -> dict[str, Any]:
    """What was found, for programs."""
    return {key: [each.to_json() for each in value] if key == "engines" else value for key, value in data.items()}


def _lines(data: dict[str, Any]) -> list[str]:
    """Show what was found, for people."""
    from quantkit.convert.engines.verdict import verdict_lines

    lines = []
    for key, value in data.items():
        if key == "linears":
            lines += [
                f"  linear    {line['count']:4d} x {line['name']:<24} [{line['out_features']}, {line['in_features']}]"
                + (f"  {line['stored_as']}" if "stored_as" in line else "")
                for line in value
            ]
        elif key == "left_at_16_bit":
            lines += [_left_line(entry) for entry in value]
        elif key == "engines":
            lines += verdict_lines(value)
        elif key == "schemes":
            lines += [f"  scheme    {count:4d} x {scheme}" for scheme, count in value.items()]
        elif key == "kv_cache":
            lines += _cache_lines(value)
        else:
            shown = f"{value:,}" if isinstance(value, int) else f"{value}"
            lines.append(f"  {key.replace('_', ' '):<18} {shown}")
    return lines


def _left_line(entry: dict[str, Any]) -> str:
    """Show weights that are copied: how many tensors, which, why, and how many weights they hold."""
    why = f"{entry['reason']}, " if entry["reason"] else ""
    kind = entry.get("stored_as", "16 bit")
    return f"  {kind:<9} {entry['tensors']:4d} x {entry['name']:<24} ({why}{entry['weights']:,} weights)"


def _cache_lines(data: dict[str, Any]) -> list[str]:
    """Show the stored plan of the KV cache: a line for all layers, and one for each kind where they differ."""
    from quantkit.core.kvscheme import cache_words

    lines = [f"  {'KV cache':<18} {cache_words(data['bits'], data['scales'], data['stored_bits'])}"]
    kinds: dict[tuple[int, int], list[str]] = {}
    for index, layer in enumerate(data["layers"]):
        kinds.setdefault((layer["keys"], layer["values"]), []).append(str(index))
    if len(kinds) > 1:
        lines += [
            f"  cache     {len(where):4d} x keys {keys:2d}, values {values:2d} bits   layers {', '.join(where)}"
            for (keys, values), where in sorted(kinds.items(), reverse=True)
        ]
    if data["scales"] == "online" and data["static"]:
        lines.append(f"  {'static scales':<18} of {data['static']} layers stored too (--kv-scales static)")
    if data["scales"] != "fp8":
        lines.append(f"  {'read by':<18} quantkit; other engines keep the cache their own way")
    return lines


def _check_lines(check: Any) -> list[str]:
    """Show the proof: one section for each kind of block, like modules (experts) counted."""
    from quantkit.model.patterns import short_names

    stepping = "equals the model's own forward bit for bit"
    if not check.exact:
        stepping = f"differs from the model's own forward by {check.difference:.1e} (relative)"
    lines = [
        f"  check on a random twin of {check.blocks} blocks, {check.parameters / 1e6:.1f} M weights",
        f"  stepping  {stepping}",
    ]
    for kind in check.kinds:
        lines.append(f"  {kind.module}, twin's blocks {', '.join(map(str, kind.blocks))}")
        lines += [f"    one input {names}" for names in _counted(", ".join(short_names(g)) for g in kind.groups)]
        lines += [f"    fold      {text}" for text in _counted(fold.describe() for fold in kind.folds.accepted)]
        refused = (f"{short_names([r.producer])[0]}: {r.reason}" for r in kind.folds.refused)
        lines += [f"    refused   {text}" for text in _counted(refused)]
    return lines


def _counted(texts: Iterable[str]) -> list[str]:
    """Merge equal texts, with their count."""
    counts: dict[str, int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    return [text if count == 1 else f"{text}  ({count} x)" for text, count in counts.items()]


def _structure(source: Any) -> dict[str, Any]:
    """Describe a floating-point model: blocks, linears, sizes."""
    from quantkit.convert.plan.targets import block_targets
    from quantkit.convert.report.left_at_16_bit import left_at_16_bit
    from quantkit.model.skeleton import build_skeleton, find_blocks
    from quantkit.model.weights import Weights

    model = build_skeleton(source.config)
    blocks = find_blocks(model)
    weights = Weights(model, source)
    kinds: dict[tuple[str, int, int], list[str]] = {}
    for module, (stored, linear) in block_targets(blocks, weights).items():
        name = module.removeprefix(f"{blocks.prefix}.").partition(".")[2]
        key = (EXPERT.sub("experts.*", name), linear.out_features, linear.in_features)
        kinds.setdefault(key, []).append(f"{stored}.weight")
    infos = [source.info(name) for name in source.names()]
    return {
        "model_type": source.config["model_type"],
        "blocks": len(blocks),
        "block_list": blocks.prefix,
        "parameters": sum(p.numel() for name, p in weights.parameters.items() if name not in weights.tied),
        "tied": _tied(weights.tied),
        "tensors": len(infos),
        "bytes": sum(info.nbytes for info in infos),
        "file_bytes": source.file_bytes(),
        "stored_as": ", ".join(source.kinds()),
        "left_at_16_bit": [{**asdict(each), **_types(source, [each.name])} for each in left_at_16_bit(weights, blocks)],
        "linears": [
            {"name": n, "out_features": o, "in_features": i, "count": len(names), **_types(source, names)}
            for (n, o, i), names in kinds.items()
        ],
        **_cache(source),
    }


def _types(source: Any, names: list[str]) -> dict[str, str]:
    """Name the block formats of a GGUF file's tensors, with their counts where they differ; empty for a folder."""
    from quantkit.checkpoint.gguf_files.source import GGUFSource

    known = set(source.names()) if isinstance(source, GGUFSource) else set()
    counts = Counter(source.kind(name) for name in names if name in known).most_common()
    if not counts:
        return {}
    return {"stored_as": counts[0][0] if len(counts) == 1 else ", ".join(f"{count} {kind}" for kind, count in counts)}


def _tied(tied: dict[str, str]) -> str:
    """Name the first pairs of parameters that are one tensor, and how many more there are."""
    pairs = [f"{twin} = {first}" for twin, first in tied.items()]
    more = f" and {len(pairs) - 2} more" if len(pairs) > 2 else ""
    return ", ".join(pairs[:2]) + more or "nothing"


def _cache(source: Any) -> dict[str, Any]:
    """Describe the KV cache as the folder has it; empty if it says nothing (16 bits)."""
    from quantkit.convert.report.kv_cache import average_bits
    from quantkit.formats.kv_scales import read_kv_plan

    plan = read_kv_plan(source.path) if source.path.is_dir() else None
    if plan is None:
        return {}
    measured = plan.layers and set(plan.layers) <= set(plan.static)
    layers = [{"name": name, "keys": layer.keys, "values": layer.values} for name, layer in plan.layers.items()]
    return {
        "kv_cache": {
            "bits": plan.label,
            "scales": plan.scheme.scales,
            "stored_bits": average_bits(plan)[1] if measured else None,
            "static": len(plan.static),
            "layers": layers,
        }
    }


def _quantized(source: Any) -> dict[str, Any]:
    """Describe a quantized model: schemes, sizes, and which engines load it."""
    from quantkit.convert.engines.lint import lint_folder
    from quantkit.formats.reader import QuantizedReader

    reader = QuantizedReader(source)
    kinds = [reader.scheme(name) for name in reader.modules]
    schemes = Counter(scheme if isinstance(scheme, str) else scheme.describe() for scheme in kinds)
    return {
        "model_type": source.config.get("model_type", "unknown"),
        "quant_method": (source.quantization() or {})["quant_method"],
        "format": reader.format,
        "schemes": dict(schemes.most_common()),
        "quantized_linears": len(reader.modules),
        "plain_tensors": len(reader.plain_names()),
        "bytes": sum(source.info(name).nbytes for name in source.names()),
        **_cache(source),
        "engines": lint_folder(source),
    }
