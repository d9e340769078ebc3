"""Int8 activations: the definition that kernels are held to, and the scheme that asks for it."""

from __future__ import annotations

import pytest
import torch

from quantkit.core.rounding.activations import quantize_tokens, round_tokens
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError


def test_each_token_has_its_own_scale_and_its_largest_entry_is_exact() -> None:
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-4], [1.0], [7.0], [1e3], [1e-20]]
    )
    codes, scale = quantize_tokens(x)
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert codes.abs().amax(1).tolist() == [127] * 5
    torch.testing.assert_close(scale[:, 0], x.abs().amax(1) / 127)
    assert bool(((codes * scale - x).abs() <= 0.50001 * scale).all())


def test_halves_round_to_even() -> None:
    codes, scale = quantize_tokens(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]))
    assert scale.item() == 1
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_zeros_stay_zeros_and_what_is_not_finite_stays_visible() -> None:
    x = torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
    codes, scale = quantize_tokens(x)
    assert codes[0].tolist() == [0, 0]
    assert scale[0].item() == 0
    assert not bool(scale[1:].isfinite().any())
    assert round_tokens(x[:1]).tolist() == [[0.0, 0.0]]


def test_rounding_is_in_float32_whatever_the_dtype() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    rounded = round_tokens(x)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, round_tokens(x.float()).bfloat16())


def test_a_scheme_says_that_activations_are_int8() -> None:
    scheme = Scheme(8, None, activations="int8")
    assert scheme.describe() == "W8A8 channel sym"
    assert scheme != Scheme(8, None)
    assert Scheme.from_json(scheme.to_json()) == scheme
    assert "activations" not in Scheme(8, None).to_json()  # what an older quantkit reads stays what it was


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ({"bits": 4, "group_size": None}, "W4A8 channel sym"),
        ({"bits": 8, "group_size": 64}, "W8A8 g64 sym"),
        ({"bits": 8, "group_size": None, "symmetric": False}, "W8A8 channel asym"),
    ],
)
def test_other_weights_do_not_go_with_int8_activations(scheme: dict[str, int], name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}: .* --bits 8 --group-size channel --sym"):
        Scheme(**scheme, activations="int8")
