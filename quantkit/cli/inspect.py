"""``quantkit inspect SOURCE``"""

from __future__ import annotations

from typing import Any

import click

from quantkit.cli.main import print_json
from quantkit.errors import RequestError


@click.command()
@click.argument("source")
@click.option("--check", is_flag=True, hidden=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(source: str, check: bool, as_json: bool) -> None:
    """Show what quantkit finds in SOURCE: architecture, decoder blocks, linears, sizes. Reads headers only."""
    from quantkit.checkpoint.source import open_source

    if check:
        raise RequestError("--check: this capability has not landed yet. Leave the option out.")
    opened = open_source(source)
    data = _structure(opened) if opened.quantization() is None else _quantized(opened)
    if as_json:
        print_json(data)
        return
    click.echo(f"{opened.path}")
    for key, value in data.items():
        if key == "linears":
            for line in value:
                click.echo(
                    f"  linear    {line['count']:4d} x {line['name']:<24} [{line['out_features']}, {line['in_features']}]"
                )
        else:
            click.echo(
                f"  {key.replace('_', ' '):<18} {value:,}"
                if isinstance(value, int)
                else f"  {key.replace('_', ' '):<18} {value}"
            )


def _structure(source: Any) -> dict[str, Any]:
    from quantkit.model.skeleton import Weights, block_linears, build_skeleton, find_blocks

    model = build_skeleton(source.config)
    blocks = find_blocks(model)
    weights = Weights(model, source)
    kinds: dict[tuple[str, int, int], int] = {}
    for block in blocks.modules:
        for name, linear in block_linears(block).items():
            key = (name, linear.out_features, linear.in_features)
            kinds[key] = kinds.get(key, 0) + 1
    infos = [source.info(name) for name in source.names()]
    return {
        "model_type": source.config["model_type"],
        "blocks": len(blocks),
        "block_list": blocks.prefix,
        "parameters": sum(p.numel() for name, p in weights.parameters.items() if name not in weights.tied),
        "tied": ", ".join(f"{a} = {b}" for a, b in weights.tied.items()) or "nothing",
        "tensors": len(infos),
        "bytes": sum(info.nbytes for info in infos),
        "stored_as": ", ".join(sorted({str(info.dtype).removeprefix("torch.") for info in infos})),
        "linears": [{"name": n, "out_features": o, "in_features": i, "count": c} for (n, o, i), c in kinds.items()],
    }


def _quantized(source: Any) -> dict[str, Any]:
    from quantkit.formats.reader import QuantizedReader

    reader = QuantizedReader(source)
    return {
        "model_type": source.config["model_type"],
        "quant_method": (source.quantization() or {})["quant_method"],
        "quantized_linears": len(reader.modules),
        "plain_tensors": len(reader.plain_names()),
        "bytes": sum(source.info(name).nbytes for name in source.names()),
    }
