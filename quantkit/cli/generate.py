"""``quantkit generate MODEL --prompt TEXT``"""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from quantkit.cli.option_groups import GroupedCommand, grouped
from quantkit.cli.output import print_json
from quantkit.errors import RequestError

MOST_PROMPT = 16_000_000  # bytes, beyond any context
LOADING = ("device", "dtype", "kv_bits", "kv_scales", "head_bits")  # options of quantkit.load, passed on as they are


@click.command(cls=GroupedCommand)
@click.argument("model")
@grouped("Text", "--prompt", required=True, help="Text to continue; '-' reads it from standard input.")
@grouped(
    "Text", "--image", "images", multiple=True, metavar="FILE",
    help="Image that the prompt is about (repeatable); for models with vision.",
)  # fmt: skip
@grouped("Text", "--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@grouped("Text", "--max-tokens", type=int, default=128, show_default=True, help="New tokens at most.")
@grouped("Text", "--stop", multiple=True, help="String that ends the text (repeatable); not printed.")
@grouped("Text", "--stream/--no-stream", default=True, show_default=True, help="Print text as it comes.")
@grouped("Text", "--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@grouped(
    "Sampling", "--temperature", type=float, default=0.0, show_default=True, help="0: always the most likely token."
)
@grouped("Sampling", "--top-k", type=int, default=0, show_default=True, help="Keep the k most likely tokens; 0: all.")
@grouped(
    "Sampling", "--top-p", type=float, default=1.0, show_default=True, help="Keep the smallest set of this probability."
)
@grouped(
    "Sampling", "--min-p", type=float, default=0.0, show_default=True, help="Drop tokens below this share of the best."
)
@grouped("Sampling", "--repetition-penalty", type=float, default=1.0, show_default=True, help="Above 1: repeat less.")
@grouped("Sampling", "--seed", type=int, default=0, show_default=True, help="Same seed and prompt: same text.")
@grouped(
    "KV cache",
    "--kv-bits",
    metavar="BITS",
    help="KV cache of 16, 8, 4, 3, 2 bits, fp8, or k4v2: keys and values apart.  [default: what the model says]",
)
@grouped(
    "KV cache",
    "--kv-scales",
    type=click.Choice(["online", "static"]),
    help="Scales made on the way, or those that convert stored.",
)
@grouped(
    "Running", "--head-bits", type=int,
    help="Bits of a dense head: 16 (as stored), 8 or 4.  [default: 8 on a CPU beside weights of at most 6, else 16]",
)  # fmt: skip
@grouped("Running", "--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@grouped("Running", "--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16 (GPU only).")
@grouped("Running", "--deterministic", is_flag=True, help="The same text as this prompt gets in any batch.")
@grouped("Running", "--no-graphs", is_flag=True, help="GPU: launch decode steps kernel by kernel, not as CUDA graphs.")
def command(
    *, model: str, prompt: str, images: tuple[str, ...], stream: bool, no_graphs: bool, as_json: bool, **given: Any
) -> None:
    """Generate text with MODEL: a folder, a .gguf file, a hub id (org/name), or a name that `quantkit fetch` knows.
    Timings go to stderr.
    """
    from quantkit.runtime.generate.sampling import GenerationOptions
    from quantkit.runtime.images.files import read_image
    from quantkit.runtime.load import load
    from quantkit.runtime.path_words import path_words

    loading = {name: given.pop(name) for name in LOADING}
    wanted = GenerationOptions(**given)  # a wrong option is told before the model is loaded
    if prompt == "-":
        prompt = _read_prompt()
    if not prompt:
        raise RequestError("--prompt: the prompt is empty. Give some text.")
    seen = [read_image(file) for file in images]
    start = time.perf_counter()
    loaded = load(model, graphs=not no_graphs, **loading)
    load_seconds = time.perf_counter() - start
    if stream and not as_json:
        result = _print_stream(loaded.stream(prompt, wanted, images=seen))
    else:
        result = loaded.generate(prompt, wanted, images=seen)
        if not as_json:
            click.echo(result.text)
    if as_json:
        print_json(_record(loaded, result, load_seconds))
    else:
        click.echo(_timings(loaded, result, load_seconds), err=True)
        click.echo(f"ran on {path_words(loaded)}", err=True)


def _read_prompt() -> str:
    """Read the prompt from standard input. Raises RequestError for what is too long or no text."""
    data = sys.stdin.buffer.read(MOST_PROMPT + 1)
    if len(data) > MOST_PROMPT:
        raise RequestError(f"--prompt -: standard input goes beyond {MOST_PROMPT:,} bytes. Give less text.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompt -: standard input is not UTF-8 text (byte {error.start}).") from error


def _median_latency(result: Any) -> float:
    """Seconds between tokens; 0 for an answer of one token."""
    latencies = sorted(result.inter_token_latencies)
    return latencies[len(latencies) // 2] if latencies else 0.0


def _record(loaded: Any, result: Any, load_seconds: float) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "load_seconds": load_seconds,
        "time_to_first_token": result.time_to_first_token,
        "inter_token_latency_median": _median_latency(result),
        "inter_token_latencies": result.inter_token_latencies,
        "tokens_per_second": result.tokens_per_second,
        "kv_bits": loaded.kv_bits,
        "kv_scales": loaded.kv_plan.kind,
        "kv_stored_bits": loaded.kv_stored_bits,
        "kv_cache_bytes": result.kv_cache_bytes,
        "memory": loaded.memory(),
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "decoding": loaded.decoding,
        "head_bits": loaded.head_bits,
    }


def _timings(loaded: Any, result: Any, load_seconds: float) -> str:
    """One line for people."""
    return (
        f"loaded in {load_seconds:.1f} s; {result.prompt_tokens} prompt tokens, first token after "
        f"{result.time_to_first_token * 1e3:.0f} ms; {len(result.tokens)} tokens,"
        f" {_median_latency(result) * 1e3:.1f} ms each (median), "
        f"{result.tokens_per_second:.1f} tokens/s; KV cache {loaded.kv_words}, {result.kv_cache_bytes / 1e6:.2f} MB; "
        f"ended by {result.finish_reason}"
    )


def _print_stream(pieces: Any) -> Any:
    """Print pieces as they come; the generator's return value is the finished answer."""
    while True:
        try:
            click.echo(next(pieces), nl=False)
        except StopIteration as end:
            click.echo()
            return end.value
        sys.stdout.flush()
