"""Problems are data until they are printed."""

from __future__ import annotations

from quantkit.convert.options.rules import Problem, collapse


def test_layers_with_one_reason_are_one_line_and_colons_decide_nothing() -> None:
    problems = [Problem("rule 'a: b'", "late"), Problem("c", "late"), Problem("d", "early: very")]
    assert collapse(problems) == ["rule 'a: b' and 1 more: late", "d: early: very"]
