"""Rules: syntax, first match wins, what they match, and who must share a scheme."""

from __future__ import annotations

import pytest

from quantkit.convert.options.rules import choose_schemes, parse_rule, parse_rules, split_fused
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError

BASE = Scheme(4, 128, symmetric=False, scale_dtype="bfloat16")
BLOCK = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LINEARS = [f"model.layers.{i}.{name}" for i in range(12) for name in BLOCK]
OUTSIDE = ["model.embed_tokens", "lm_head"]


def chosen(*rules: str) -> dict[str, Scheme | None]:
    return dict(choose_schemes(parse_rules(rules, BASE), BASE, LINEARS, OUTSIDE).schemes)


def changed(*rules: str) -> set[str]:
    plain = chosen()
    return {name for name, scheme in chosen(*rules).items() if scheme != plain[name]}


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("x=bits:8", Scheme(8, 128, False, "bfloat16")),
        ("x=bits:8,group:64", Scheme(8, 64, False, "bfloat16")),
        ("x=group:channel", Scheme(4, None, False, "bfloat16")),
        ("x= sym , bits:3 ", Scheme(3, 128, True, "bfloat16")),
        ("re:a(?=b).*=asym", BASE),
        ("x=keep", None),
    ],
)
def test_a_rule_changes_what_it_names_and_keeps_the_rest(text: str, scheme: Scheme | None) -> None:
    assert parse_rule(text, BASE).scheme(BASE) == scheme


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("*.down_proj", "no pattern"), ("=bits:8", "no pattern"), ("x=", "'' is no setting"),
        ("x=bits", "whole number"), ("x=bits:9", "bits=9"), ("x=bits:1", "bits=1"), ("x=bits:-4", "whole number"),
        ("x=group:0", "whole number"), ("x=group:big", "whole number"), ("x=bits:8,bits:4", "bits is set twice"),
        ("x=sym,asym", "symmetric is set twice"), ("x=keep,bits:8", "'keep'"), ("x=bit:8", "did you mean 'bits'"),
        ("re:([=bits:8", "no regular expression"), ("x=bits:٨", "whole number"),
    ],
)  # fmt: skip
def test_bad_syntax_is_one_message_with_an_example(text: str, said: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_rule(text, BASE)
    assert said in str(error.value)
    assert repr(text) in str(error.value)
    assert "Example:" in str(error.value)
    assert "\n" not in str(error.value)


def test_one_string_instead_of_a_list_is_refused() -> None:
    with pytest.raises(RequestError, match="give a list"):
        parse_rules("*.down_proj=bits:8", BASE)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("*.down_proj", 12), ("down_proj", 12), ("mlp.down_proj", 12), ("model.layers.1.*", 6), ("layers.1.*", 6),
        ("layers.[0-3].mlp.*", 12), ("layers.1?.*", 12), ("re:.*\\.layers\\.(0|11)\\..*", 12), ("*", 72),
        ("lm_head", 1), ("model.embed_tokens", 1), ("*.embed_tokens", 1), ("*lm_head", 1), ("re:lm_head", 1),
        ("re:(lm_head)", 1),
    ],
)  # fmt: skip
def test_patterns_take_whole_names_or_what_follows_a_dot(pattern: str, count: int) -> None:
    assert len(changed(f"{pattern}=bits:8")) == count


def test_a_wildcard_alone_leaves_head_and_embeddings_alone() -> None:
    assert not changed("*=bits:8", "re:.*=bits:7") & set(OUTSIDE)


def test_the_first_match_wins() -> None:
    found = chosen("layers.0.*=keep", "*.down_proj=bits:8", "*=bits:5")
    assert found["model.layers.0.mlp.down_proj"] is None
    assert found["model.layers.1.mlp.down_proj"] == Scheme(8, 128, False, "bfloat16")
    assert found["model.layers.1.mlp.up_proj"] == Scheme(5, 128, False, "bfloat16")
    assert found["lm_head"] is None


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("*.down_porj", "mlp.down_proj"), ("lm_haed", "lm_head"), ("model.layers.99.mlp.up_proj", "mlp.up_proj"),
     ("zzz", "last names: q_proj, k_proj, v_proj, gate_proj"), ("DOWN_PROJ", "down_proj")],
)  # fmt: skip
def test_a_rule_that_matches_nothing_is_an_error_with_the_nearest_names(pattern: str, near: str) -> None:
    with pytest.raises(RequestError, match="matches no module") as error:
        chosen(f"{pattern}=bits:8")
    assert near in str(error.value)


def test_a_rule_in_the_shadow_of_earlier_ones_is_a_problem() -> None:
    rules = parse_rules(["*.down_proj=bits:8", "mlp.*=bits:6", "mlp.up_proj=keep", "layers.0.mlp.*=bits:5"], BASE)
    problems = choose_schemes(rules, BASE, LINEARS, OUTSIDE).problems
    assert len(problems) == 2
    assert "'mlp.up_proj=keep' has no effect" in problems[0].subject
    assert (
        "*.down_proj=bits:8, mlp.*=bits:6" in problems[1].reason
        or "mlp.*=bits:6, *.down_proj=bits:8" in problems[1].reason
    )


@pytest.mark.parametrize(
    ("rules", "problems"),
    [
        ((), 0), (("*.down_proj=bits:8",), 0), (("*.v_proj=bits:8",), 1), (("*.v_proj=keep",), 1),
        (("*.v_proj=bits:8", "*.up_proj=bits:8"), 2), (("layers.3.self_attn.*=bits:8",), 0),
        (("re:.*\\.[qkv]_proj=bits:8",), 0), (("lm_head=bits:8",), 0),
    ],
)  # fmt: skip
def test_fused_siblings_with_different_schemes_are_found(rules: tuple[str, ...], problems: int) -> None:
    assert len(split_fused(chosen(*rules))) == problems


def test_the_remedy_for_split_fused_linears_mends_them() -> None:
    sentence = split_fused(chosen("*.v_proj=bits:8"))[0]
    assert sentence.startswith("model.layers.0.self_attn and 11 more: q_proj W4 g128 asym, v_proj W8 g128 asym")
    remedy = sentence.partition("all of them, '")[2].partition("=...'")[0]
    assert changed(f"{remedy}=bits:8") == {name for name in LINEARS if "self_attn" in name}


def test_experts_of_one_layer_are_siblings() -> None:
    names = [f"model.layers.0.mlp.experts.{i}.{p}" for i in range(3) for p in ("gate_proj", "up_proj", "down_proj")]
    one = choose_schemes(parse_rules(["experts.1.down_proj=bits:8"], BASE), BASE, names, [])
    assert "model.layers.0.mlp.experts" in split_fused(one.schemes)[0]
    every = choose_schemes(parse_rules(["*.experts.*=bits:8"], BASE), BASE, names, [])
    assert split_fused(every.schemes) == []
