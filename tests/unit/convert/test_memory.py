"""What a conversion is predicted to need on a device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.convert.plan.memory import Prediction, Sizes, check_device, predict

HIDDEN, INNER = 4096, 14336
LARGE = Sizes(  # a block of an 8B model, 128 windows of 2048 tokens
    before_blocks=128256 * HIDDEN, stored_itemsize=2, largest_plain=128256 * HIDDEN,
    block=2 * HIDDEN * HIDDEN + 2 * 1024 * HIDDEN + 3 * INNER * HIDDEN, widest=14336,
    widths=(HIDDEN, HIDDEN, HIDDEN, INNER), largest_parameter=INNER * HIDDEN, largest_group=2 * INNER * HIDDEN,
    groups=((HIDDEN, 2 * INNER * HIDDEN), (INNER, INNER * HIDDEN)),
    inner=11 * HIDDEN + 4 * INNER, hidden=HIDDEN,
    tokens=128 * 2048, seq_len=2048, plain_bytes=2 * 10**9, packed_bytes=4 * 10**9, calibrated=True, kv_sample_bytes=0,
    head_embedding_bytes=0,
)  # fmt: skip


def test_a_block_of_8b_fits_into_12_gb_of_a_gpu_however_long_the_text_is() -> None:
    need = predict(LARGE, "cuda")
    assert 6e9 < need.device < 12e9
    longer = predict(dataclasses.replace(LARGE, tokens=16 * LARGE.tokens), "cuda")
    assert longer.device == need.device
    assert longer.host > need.host


def test_a_cpu_needs_no_device_memory_and_a_gpu_less_of_the_host() -> None:
    assert predict(LARGE).device == 0
    assert predict(LARGE, "cuda").phases["solve"] < predict(LARGE).phases["solve"]


def test_a_method_that_compares_with_the_original_keeps_both_models_states() -> None:
    both = dataclasses.replace(LARGE, paired=True)
    crossed = dataclasses.replace(both, crossed=True)
    assert predict(crossed).phases["block"] - predict(both).phases["block"] > sum(w * w for w in LARGE.widths) * 8
    assert predict(crossed, "cuda").device > predict(both, "cuda").device
    states = LARGE.tokens * HIDDEN * 4
    assert predict(both).phases["block"] - predict(LARGE).phases["block"] == states
    assert predict(both).work - predict(LARGE).work == 2 * states


def test_without_statistics_a_device_holds_the_block_and_what_is_searched() -> None:
    plain = dataclasses.replace(LARGE, calibrated=False, tokens=0)
    assert 4 * plain.block < predict(plain, "cuda").device < predict(LARGE, "cuda").device


def test_a_gpu_with_less_free_memory_is_a_problem_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 80 * 10**9))
    need = Prediction(host=0, device=3 * 10**9, disk=0, work=0, output=0, phases={})
    (problem,) = check_device(torch.device("cuda"), need)
    assert "3.00 GB" in problem
    assert "--device cpu" in problem
    assert not check_device(torch.device("cuda"), dataclasses.replace(need, device=10**9))
    assert not check_device(torch.device("cpu"), need)


def test_where_measuring_takes_the_most_of_a_gpu_the_option_that_spares_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 80 * 10**9))
    gpu = torch.device("cuda")
    for measuring, named in ((64 * 10**9, True), (1, False)):
        need = predict(dataclasses.replace(LARGE, measuring=measuring), "cuda")
        (problem,) = check_device(gpu, need, spares="--no-guided")
        assert ("--no-guided" in problem) is named
        assert "--no-guided" not in check_device(gpu, need)[0]


def test_what_was_measured_stays_in_the_work_folder() -> None:
    kept = predict(dataclasses.replace(LARGE, measured=10**9))
    assert kept.work - predict(LARGE).work == 10**9
    assert kept.disk - predict(LARGE).disk == 10**9
