"""headlens/docs/families.md is what capture gives of all builds of helpers/families.py."""

import pytest
from helpers.families import BUILDS, PAGE, SOME, check, page


@pytest.mark.parametrize("build", [name for name in BUILDS if name not in SOME])
def test_maps_are_those_of_the_model_or_it_is_refused(build):
    check(build)


def test_the_page_is_what_the_builds_give():
    """Write it again: PYTHONPATH=.:tests python -m helpers.families"""
    assert PAGE.read_text("utf-8") == page()
