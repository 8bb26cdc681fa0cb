"""Code asks a platform's facts; its name stands in few files."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from meshpar.hardware.devices import DEVICES
from meshpar.hardware.platforms import PLATFORMS, Platform, platform_named

ROOT = Path(__file__).parents[1]
NAMES = {*PLATFORMS, "cuda"}
MOST_FILES = 5


def compared_names(tree):
    """Yield the strings that code compares with, or looks up in a literal dict."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                yield from (
                    each.value
                    for each in ast.walk(side)
                    if isinstance(each, ast.Constant)
                )
        elif isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant))


def test_a_platforms_name_is_compared_in_few_files():
    files = [
        str(path.relative_to(ROOT))
        for room in ("meshpar", "models")
        for path in sorted((ROOT / room).rglob("*.py"))
        if NAMES & {*map(str, compared_names(ast.parse(path.read_text())))}
    ]
    assert len(files) <= MOST_FILES, files


def test_a_platform_that_is_none_of_ours_has_plain_facts():
    unknown = platform_named("abacus")
    assert unknown == Platform(name="abacus")
    assert unknown.num_batch_parts(num_examples=8, tokens=8 * 4096) == 1


@pytest.mark.parametrize("name", PLATFORMS)
def test_each_platform_is_named_as_jax_names_it(name):
    assert PLATFORMS[name].name == name
    assert {field.name for field in fields(Platform)} == set(vars(PLATFORMS[name]))


def test_each_device_has_a_known_platform():
    assert {device.platform for device in DEVICES.values()} <= set(PLATFORMS)
