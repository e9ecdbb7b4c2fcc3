import pytest

from traces.common.units import number_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.53612, "0.536"),
        (9.996, "10"),
        (119.4, "119"),
        (1234.5, "1,230"),
        (2516582400, "2,520,000,000"),
        (-0.07, "-0.07"),
        (0.0000123456, "0.0000123"),
    ],
)
def test_numbers_for_people_have_three_significant_digits(value: float, text: str) -> None:
    assert number_text(value) == text
