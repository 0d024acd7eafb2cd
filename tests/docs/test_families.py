"""headlens/docs/families.md is what capture gives of all builds of helpers/families.py."""

import pytest
from helpers.families import BUILDS, SOME, check


@pytest.mark.parametrize("build", [name for name in BUILDS if name not in SOME])
def test_maps_are_those_of_the_model_or_it_is_refused(build):
    check(build)
