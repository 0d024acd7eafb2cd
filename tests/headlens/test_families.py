"""Decoders of transformers, one of each kind: exact maps, or a refusal. All builds:
tests/docs/test_families.py."""

import pytest
from helpers.families import SOME, check


@pytest.mark.parametrize("build", SOME)
def test_maps_are_those_of_the_model_or_it_is_refused(build):
    check(build)
