"""``quantkit eval --kv-bits``: the quantized cache is really read.

What it costs is told by position, by planted facts and by greedy text.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import quantkit
from quantkit.cli.eval import command
from quantkit.errors import RequestError
from quantkit.evaluate.api import evaluate
from quantkit.evaluate.kv_cache import greedy_text
from quantkit.evaluate.perplexity import token_losses
from quantkit.evaluate.prepare import prepare
from quantkit.runtime.kv_cache.paged_layer import PagedLayer

SEQ_LEN = 256  # 4 pages; with 64 recent tokens those before 193 are packed at the end


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = [
        f"The {a} {b} {c} near the gate."
        for a in ("old", "small", "grey")
        for b in ("fox", "river")
        for c in ("runs", "waits")
    ]
    path = tmp_path_factory.mktemp("text") / "evaluation.txt"
    path.write_text(" ".join(f"{i}. {word}" for i, word in enumerate(words * 60)))
    return path


@pytest.fixture(scope="module")
def roomy(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a context of 4096: rotary angles need no table."""
    import shutil

    folder = Path(shutil.copytree(tiny_original, tmp_path_factory.mktemp("roomy") / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder


@pytest.mark.parametrize(
    ("bits", "label", "stored"),
    [
        ("8", 8, 8 + 0.5 * (0.5 + 2)),
        ("4", 4, 4 + 0.5 * (0.5 + 2)),
        ("k4v2", "k4v2", 3 + 0.5 * (0.5 + 2)),
        ("2", 2, 2 + 0.5 * (0.5 + 2)),
    ],
)
def test_any_model_is_measured_with_a_quantized_cache(
    bits: str, label: int | str, stored: float, tiny_original: Path, text: Path
) -> None:
    """No calibration: keys have 32 bits of scales for 64 tokens of a channel, values for the 16 channels of a head."""
    options: dict[str, Any] = {"data": str(text), "seq_len": SEQ_LEN, "tokens": SEQ_LEN}
    found = evaluate(tiny_original, baseline=tiny_original, kv_bits=bits, **options)
    assert (found.kv_bits, found.kv_scales) == (label, "online")
    assert found.kv_bits_per_number == pytest.approx(stored)
    assert found.kl_mean is not None
    # measured 1e-8, 7e-7, 3e-5 and 4e-6: this model says nearly the same whatever it remembers
    assert 0 < found.kl_mean < {"8": 1e-6, "4": 2e-5}.get(bits, 1e-3)
    exact = evaluate(tiny_original, baseline=tiny_original, kv_bits="16", **options)
    assert (exact.kv_bits, exact.kv_scales, exact.kl_mean) == (16, None, 0.0)
    assert found.baseline_perplexity == exact.perplexity, "the baseline keeps its 16-bit cache"


def test_a_poisoned_page_moves_the_loss_of_every_later_token_and_of_none_before(
    tiny_original: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of a packed page of one layer are flipped after 128 tokens.

    Attention must have read them for anything to change.
    """
    model = quantkit.load(tiny_original, dtype="float32", dequantize=True, kv_bits=4)
    windows = prepare(tiny_original, data=str(text), seq_len=SEQ_LEN, tokens=SEQ_LEN).windows
    clean = token_losses(model, windows)[0]
    trim, poisoned = PagedLayer.trim, []

    def trim_and_poison(layer: PagedLayer) -> None:
        trim(layer)
        if layer.length == 128 and layer.packed is not None and not poisoned:
            (page,) = layer.sequences[0].packed_pages
            layer.packed.fields["values"][page] ^= 0xFF
            poisoned.append(page)

    monkeypatch.setattr(PagedLayer, "trim", trim_and_poison)
    dirty = token_losses(model, windows)[0]
    assert poisoned
    assert torch.equal(clean[:128], dirty[:128])
    assert (clean[128:] != dirty[128:]).all()
    assert clean.mean().exp() != dirty.mean().exp()


def test_what_the_cache_alone_costs_a_quantized_model_is_measured_against_itself(
    tiny_original: Path, calibration_text: Path, text: Path, tmp_path: Path
) -> None:
    quantkit.convert(tiny_original, out=tmp_path / "out", method="rtn", bits=2, group_size=32, format="native")
    options: dict[str, Any] = {"data": str(text), "seq_len": SEQ_LEN, "tokens": SEQ_LEN}
    whole, own = (
        evaluate(tmp_path / "out", baseline=b, kv_bits=4, **options) for b in (tiny_original, tmp_path / "out")
    )
    assert whole.perplexity == own.perplexity
    assert own.kl_mean is not None
    assert whole.kl_mean is not None
    assert 0 < own.kl_mean < whole.kl_mean / 2
    with pytest.raises(RequestError, match="is quantized itself"):
        evaluate(tmp_path / "out", baseline=tmp_path / "out", kv_bits=16, **options)


def test_stored_scales_and_online_ones_are_measured_apart(
    tiny_original: Path, calibration_text: Path, text: Path, tmp_path: Path
) -> None:
    quantkit.convert(
        tiny_original, out=tmp_path / "out", method="rtn", bits=8, group_size=32, kv_bits=4, samples=4, seq_len=64,
        calibration=str(calibration_text),
    )  # fmt: skip
    options: dict[str, Any] = {"data": str(text), "seq_len": SEQ_LEN, "tokens": SEQ_LEN}
    online, static, unasked = (
        evaluate(tmp_path / "out", baseline=tmp_path / "out", **how, **options)
        for how in ({"kv_bits": 4, "kv_scales": "online"}, {"kv_bits": 4, "kv_scales": "static"}, {})
    )
    assert (online.kv_scales, static.kv_scales) == ("online", "static")
    assert static.kv_bits_per_number == 4.0 < online.kv_bits_per_number
    assert static.kl_mean is not None
    assert online.kl_mean is not None
    assert 0 < online.kl_mean < static.kl_mean < 1e-3
    assert (unasked.kv_bits, unasked.kl_mean) == (4, online.kl_mean), "what the checkpoint says"
    with pytest.raises(RequestError, match="no static KV scales"):
        evaluate(tiny_original, kv_bits=4, kv_scales="static", **options)


def test_bands_facts_and_greedy_text_are_in_the_json_and_in_the_table(roomy: Path, text: Path) -> None:
    done = evaluate(
        roomy, baseline=roomy, kv_bits="k4v2", data=str(text), seq_len=1100, tokens=1100, planted_fact=True, greedy=9
    )
    found = json.loads(json.dumps(done.to_json()))
    assert [(band["start"], band["stop"]) for band in found["by_position"]] == [(0, 256), (256, 1024), (1024, 1099)]
    near, *far = (band["kl_mean"] for band in found["by_position"])
    assert all(one > near for one in far), "damage begins when pages leave the newest tokens"
    facts = found["planted_fact"]
    assert (facts["facts"], facts["texts"], facts["context"], len(facts["by_depth"])) == (20, 4, 1100, 5)
    assert facts["difference"] == pytest.approx(facts["log_prob"] - facts["log_prob_16_bit"])
    assert facts["difference"] != 0
    assert facts["difference_stderr"] > 0
    assert (found["greedy"]["prompts"], found["greedy"]["prompt_tokens"], found["greedy"]["tokens"]) == (1, 1091, 9)
    assert 0 <= found["greedy"]["first_difference"][0] <= 9
    shown = done.table(bands=True)
    for part in ("by position", "1024 - 1099", "planted facts", "greedy text", "k4v2, online scales: 4.250 bits"):
        assert part in shown
    assert "by position" not in done.table()


def test_the_command_line_hands_on_what_it_is_told(tiny_original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def pretend(model: str, **given: Any) -> Any:
        told.update(given)
        return SimpleNamespace(to_json=dict, table=lambda **how: told.update(how) or "the table")

    monkeypatch.setattr("quantkit.evaluate.api.evaluate", pretend)
    options = ["--kv_bits", "k4v2", "--kv-scales", "online", "--planted-fact", "--greedy", "9", "--by-position"]
    done = CliRunner().invoke(command, [str(tiny_original), *options], catch_exceptions=False)
    assert done.output == "the table\n"
    expected = {"kv_bits": "k4v2", "kv_scales": "online", "planted_fact": True, "greedy": 9, "bands": True}
    assert {name: told[name] for name in expected} == expected


def test_greedy_texts_part_where_the_first_token_differs(
    roomy: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact model's text beside one that is changed after five tokens, and beside itself."""
    windows = prepare(roomy, data=str(text), seq_len=40, tokens=120).windows
    exact = quantkit.load(roomy, dtype="float32", dequantize=True, kv_bits=16)
    same = greedy_text.measure_greedy(exact, exact, windows, 8)
    assert (same.share, same.identical, same.first_difference) == (1.0, 1.0, [8, 8, 8])
    true = greedy_text.continued(exact, windows.ids[0, :32].tolist(), 8)
    assert (
        true
        == exact.module.generate(windows.ids[:1, :32], max_new_tokens=8, min_new_tokens=8, do_sample=False)[
            0, 32:
        ].tolist()
    )
    other = quantkit.load(roomy, dtype="float32", dequantize=True, kv_bits=4)
    text_of = greedy_text.continued
    monkeypatch.setattr(
        greedy_text,
        "continued",
        lambda model, *given: text_of(exact, *given) if model is exact else [*text_of(exact, *given)[:5], -1, -1, -1],
    )
    found = greedy_text.measure_greedy(exact, other, windows, 8)
    assert (found.share, found.share_stderr, found.identical, found.first_difference) == (5 / 8, 0.0, 0.0, [5, 5, 5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--planted-fact"], "--planted-fact compares a quantized KV cache with a 16-bit one"),
        (["--greedy", "8", "--kv-bits", "16"], "--greedy compares a quantized KV cache with a 16-bit one"),
        (["--greedy", "200", "--kv-bits", "4", "--seq-len", "200"], "give 1 to 199"),
        (["--planted-fact", "--kv-bits", "4", "--seq-len", "200"], "Raise --seq-len to"),
        (["--kv-bits", "k4"], "or name keys and values apart, as k4v2"),
        (["--kv-bits", "4"], "--kv-bits 4 has no effect on windows of 64 tokens: .* to 129 at least"),
        (["--kv-bits", "2", "--seq-len", "192"], "has no effect on windows of 192.* to 193 at least"),
        (["--kv-bits", "4", "--stream", "--seq-len", "129"], "does not pass through a quantized KV cache"),
        (["--by-position", "--json"], "always holds by_position"),
        (["--kv-scales", "static"], "without --kv-bits"),
    ],
)
def test_a_wrong_request_for_a_cache_is_refused_before_any_weight_is_read(
    options: list[str], message: str, tiny_original: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.model.weights.Weights.read", None)
    with pytest.raises(RequestError, match=message):
        CliRunner().invoke(
            command, [str(tiny_original), "--data", str(text), "--seq-len", "64", *options], catch_exceptions=False
        )


def test_an_fp8_cache_is_measured_as_other_engines_read_it_too(tiny_original: Path, text: Path, tmp_path: Path) -> None:
    """They round every token as it is stored: what the newest tokens say is no longer exact."""
    folder = tmp_path / "out"
    quantkit.convert(
        tiny_original, folder, method="rtn", kv_bits="fp8", calibration=str(text), samples=4, seq_len=64, device="cpu"
    )
    options: dict[str, Any] = {"baseline": folder, "data": str(text), "seq_len": SEQ_LEN, "tokens": SEQ_LEN}
    ours, theirs = (evaluate(folder, kv_exact=exact, **options) for exact in (None, 0))
    assert (ours.kv_exact, theirs.kv_exact) == (None, 0)
    assert ours.kl_mean is not None
    assert theirs.kl_mean is not None
    assert theirs.kl_mean > 1.5 * ours.kl_mean
    assert "no token exact" in theirs.table()
    with pytest.raises(RequestError, match="0, or leave it out"):
        evaluate(folder, kv_exact=1, **options)
    with pytest.raises(RequestError, match="Add --kv-bits fp8"):
        evaluate(folder, kv_bits=4, kv_exact=0, **options)
