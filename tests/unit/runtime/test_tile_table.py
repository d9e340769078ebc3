"""The table of tiles: measured entries win, what cannot be read is refused, derived tiles fit what they are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError
from quantkit.runtime.kernels.triton import tile_table
from quantkit.runtime.kernels.triton.layout import TritonWeight
from quantkit.runtime.kernels.triton.tile_table import Tile, bucket, choose_tile, derive, key

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    tile_table.measured.cache_clear()
    yield
    tile_table.override(None)
    tile_table.measured.cache_clear()


def weight(rows: int, cols: int, scheme: Scheme | None = None, pair: int = 0) -> TritonWeight:
    scheme = scheme or Scheme(4, 128)
    scales = torch.ones(rows, scheme.groups(cols), dtype=torch.float16)
    zeros = None if scheme.symmetric else torch.zeros(rows, scheme.groups(cols), dtype=torch.int16)
    return TritonWeight(QuantTensor(torch.zeros(rows, cols, dtype=torch.uint8), scales, zeros, scheme), pair=pair)


def test_an_override_wins_over_the_measured_table_and_that_over_the_derived_tile() -> None:
    layer = weight(128, 256)
    assert choose_tile(layer, 5, BF16) == derive(layer, 5, tile_table.processors(torch.device("cpu")))
    path = tile_table.save("interpreter", {key(layer): {"8": Tile("gemm", 32, 16, stages=5)}}, {"torch": "x"})
    assert json.loads(path.read_text())["torch"] == "x"
    assert choose_tile(layer, 5, BF16).stages == 5
    assert choose_tile(layer, 9, BF16).stages != 5  # 16 tokens are another row
    tile_table.override({key(layer): {"8": Tile("dequantize")}})
    assert choose_tile(layer, 5, BF16) == Tile("dequantize")


def test_a_second_measurement_adds_to_the_first() -> None:
    one, other = weight(128, 256), weight(64, 128)
    tile_table.save("interpreter", {key(one): {"1": Tile("gemv", 16), "2": Tile("gemv", 32)}}, {})
    tile_table.save("interpreter", {key(other): {"1": Tile("gemv", 64)}, key(one): {"2": Tile("gemv", 64)}}, {})
    assert [choose_tile(w, tokens, BF16).block_n for w, tokens in ((one, 1), (one, 2), (other, 1))] == [16, 64, 64]


def test_a_pair_takes_what_was_measured_for_its_matrix_unless_it_was_measured_itself() -> None:
    pair, matrix = weight(256, 512, pair=128), weight(256, 512)
    tile_table.override({key(matrix): {"1": Tile("gemv", 16)}})
    assert choose_tile(pair, 1, BF16) == Tile("gemv", 16)
    tile_table.override({key(matrix): {"1": Tile("gemv", 16)}, key(pair): {"1": Tile("gemv", 64)}})
    assert choose_tile(pair, 1, BF16) == Tile("gemv", 64)


def test_a_damaged_table_is_refused_by_its_path() -> None:
    path = tile_table.save("interpreter", {}, {})
    for text in (
        "[",
        '{"tiles": {"a": {"1": {"kernel": "gemm", "speed": 3}}}}',
        '{"tiles": {"a": {"1": {"kernel": "x"}}}}',
    ):
        path.write_text(text)
        tile_table.measured.cache_clear()
        with pytest.raises(RequestError):
            choose_tile(weight(64, 128), 1, BF16)


def test_layers_are_named_by_what_a_kernel_sees() -> None:
    assert key(weight(192, 256)) == "192x256 4b g128 sym"
    assert key(weight(128, 256, Scheme(8, None, False), pair=64)) == "64+64x256 8b gchannel asym"
    assert [bucket(tokens) for tokens in (0, 1, 2, 3, 64, 65, 10**6)] == [1, 1, 2, 4, 64, 128, tile_table.LARGEST]


@pytest.mark.parametrize("shape", [(64, 128), (576, 576), (4096, 4096)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 64, 200, 4096])
def test_derived_tiles_leave_no_part_of_k_empty(shape: tuple[int, int], tokens: int) -> None:
    layer = weight(*shape)
    tile = derive(layer, tokens, 132)
    assert tile.split == 1 or layer.k_bricks >= 2 * tile.split
    assert (tile.kernel == "gemv") == (tokens == 1)
    assert tile.kernel != "gemm" or tile.block_m >= min(tokens, 64)


def test_float32_never_goes_to_the_matrix_units() -> None:
    assert {choose_tile(weight(64, 128), tokens, torch.float32).kernel for tokens in (1, 2, 16, 512)} == {
        "gemv",
        "dequantize",
    }


@pytest.mark.parametrize(
    ("capability", "wide"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_wide_tiles_are_for_devices_with_the_shared_memory_for_them(
    capability: tuple[int, int], wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consumer cards are newer than sm_90 and have 99 KB: a kernel that asks for more does not start there."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert tile_table.hopper.__wrapped__(torch.device("cuda")) is wide
