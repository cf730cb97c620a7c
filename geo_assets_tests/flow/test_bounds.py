from __future__ import annotations

import pytest

from geo_assets.flow.bounds import Bounds, Shed


def test_pulling_pauses_at_seventy_hundredths_and_goes_on_lower() -> None:
    bounds = Bounds()
    assert not bounds.pauses(69_999, False)
    assert bounds.pauses(70_000, False)
    assert bounds.pauses(69_999, True)
    assert bounds.pauses(50_000, True)
    assert not bounds.pauses(49_999, True)


def test_outside_callers_are_shed_above_ninety_hundredths_with_an_error_that_says_so() -> None:
    bounds = Bounds()
    assert not bounds.sheds(89_999, 1)
    assert bounds.sheds(89_999, 2)
    text = str(Shed("trigger queue", 89_999, 2, bounds.shed_limit))
    assert "89,999" in text
    assert "90,000" in text
    assert "none of them was taken" in text


@pytest.mark.parametrize("marks", [(0.7, 0.7, 0.9), (0.5, 0.95, 0.9), (0.5, 0.7, 1.1), (0.0, 0.7, 0.9)])
def test_marks_out_of_order_are_refused(marks: tuple[float, float, float]) -> None:
    resume, pause, shed = marks
    with pytest.raises(ValueError, match="resume_at"):
        Bounds(resume_at=resume, pause_at=pause, shed_at=shed)
