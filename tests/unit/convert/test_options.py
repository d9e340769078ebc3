"""Options that would do nothing are refused by name, on the command line and in Python alike."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.convert.options.checks import refuse_unknown, refuse_without_effect
from quantkit.convert.options.options import DEFAULTS, ConvertOptions, method_words, parse_size
from quantkit.convert.options.presets import apply_preset
from quantkit.convert.plan.bit_budget import _askable
from quantkit.errors import RequestError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            dict(method="rtn", damping=0.1),
            r"--damping has no effect: --method rtn uses no statistics of a text\. Leave it out",
        ),
        (
            dict(method="rtn", samples=4, seed=1, damping=0.1),
            "--damping, --samples, --seed have no effect: .*Leave them",
        ),
        (dict(method="awq", scales="minmax", damping=0.1), "--damping has no effect: --method awq --scales minmax"),
        (dict(method="rtn", kv_bits=8, damping=0.1, samples=4), "--damping has no effect"),
        (dict(target_bpw=4.25, bits=4), r"--bits has no effect: --target-bpw 4\.25 chooses the bits"),
        (dict(method="rtn", matmul_precision="bf16x3"), "--matmul-precision has no effect: --method rtn reads no text"),
    ],
)
def test_options_without_effect_are_refused_together(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        refuse_without_effect(given, ConvertOptions("model", Path("out"), **given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(samples="8"), "--samples '8': a whole number"),
        (dict(distil=True), "--distil True: a whole number"),
        (dict(bits=4.0), r"--bits 4\.0: a whole number"),
        (dict(target_bpw="4.5x"), "--target-bpw '4.5x': a number"),
        (dict(damping=None), "--damping None: a number"),
    ],
)
def test_a_number_of_another_type_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ConvertOptions("model", Path("out"), **given)


@pytest.mark.parametrize("method", ["awq", "tune", "hqq"])
def test_a_method_that_always_scales_channels_cannot_be_told_not_to(method: str) -> None:
    with pytest.raises(RequestError, match=f"--no-fold has no effect: --method {method} always scales channels"):
        refuse_without_effect({"method", "fold"}, ConvertOptions("model", Path("out"), method=method, fold=False))


@pytest.mark.parametrize(
    "given",
    [
        dict(method="gptq", scales="minmax", damping=0.1),
        dict(method="awq", damping=0.1, seed=1),
        dict(method="rtn", kv_bits=8, samples=4, seq_len=64, seed=1),
        dict(method="awq", gptaq=False, tune_steps=DEFAULTS["tune_steps"]),
        dict(method="rtn", fold=False),
        dict(
            method="rtn",
            damping=0.01,
            samples=128,
            seq_len=1024,
            seed=0,
            calibration="wikipedia-sample",
            matmul_precision="auto",
        ),
        dict(kv_scales="online"),
    ],
)
def test_options_with_an_effect_and_defaults_are_not(given: dict[str, Any]) -> None:
    refuse_without_effect(given, ConvertOptions("model", Path("out"), **given))


@pytest.mark.parametrize(
    ("preset", "given", "words"),
    [
        ("balanced", {}, "gptq --fold --guided (preset balanced)"),
        ("balanced", dict(fold=False, guided=False), "gptq --no-fold --no-guided (preset balanced)"),
        ("best", {}, "tune --tune-steps 120 --distil 128 (preset best)"),
        ("best", dict(distil=0, tune_steps=80), "tune --tune-steps 80 --distil 0 (preset best)"),
        ("fast", dict(rotate=True), "hqq --rotate (preset fast)"),
        (None, dict(gptaq=True, distil=8), "gptq --gptaq --distil 8"),
        (None, dict(method="awq"), "awq"),
    ],
)
def test_a_method_is_told_with_all_that_goes_with_it(preset: str | None, given: dict[str, Any], words: str) -> None:
    asked = ConvertOptions("model", Path("out"), preset=preset, **given, **apply_preset(preset, given))
    assert method_words(asked.method, asked.method_options, asked.preset) == words


def test_a_preset_and_what_it_stands_for_are_the_same_job() -> None:
    by_name = ConvertOptions("model", Path("out"), preset="balanced", **apply_preset("balanced", {}))
    assert (
        by_name.for_manifest()
        == ConvertOptions("model", Path("out"), method="gptq", fold=True, guided=True).for_manifest()
    )


@pytest.mark.parametrize(
    ("asked", "shown"),
    [("3.5GB", "3.5 GB"), ("700MB", "700 MB"), ("1.2GiB", "1.288 GB"), (70_000, "70 kB"), (7, "7 B")],
)
def test_a_size_is_told_in_the_unit_that_people_read(asked: int | str, shown: str) -> None:
    assert ConvertOptions("model", Path("out"), group_size="auto", target_size=asked).target == f"--target-size {shown}"


@pytest.mark.parametrize(("given", "meant"), [("groupsize", "'group_size'"), ("sym", "'symmetric'"), ("xyz", None)])
def test_a_name_that_is_not_known_is_refused_with_the_one_that_was_meant(given: str, meant: str | None) -> None:
    with pytest.raises(
        TypeError,
        match=f"unexpected option '{given}'" + (rf" \(did you mean {meant}\?\)" if meant else r"\. Known: act"),
    ):
        refuse_unknown(["bits", given])
    with pytest.raises(TypeError, match=rf"unexpected options 'aaa', '{given}'.*, on_progress, "):
        refuse_unknown(["bits", given, "aaa"])
    refuse_unknown(["bits", "group_size"])


def test_notebooks_and_signatures_show_every_option_with_its_default() -> None:
    shown = inspect.signature(quantkit.convert).parameters
    assert set(shown) == {"source", "out", "on_progress", *DEFAULTS}
    assert all(shown[name].default == value for name, value in DEFAULTS.items() if name not in ("source", "out"))
    assert "baseline" in inspect.signature(quantkit.evaluate).parameters


def test_a_size_that_is_named_can_be_asked_for() -> None:
    for size in [*range(10_000, 100_000, 37), 16_002, 1_001_000, 113_409_696, 3_500_000_001, 10**12 + 7]:
        least, most = (parse_size(_askable(size, up)) for up in (True, False))
        assert most <= size <= least
        assert least - most <= max(size / 450, 2)
