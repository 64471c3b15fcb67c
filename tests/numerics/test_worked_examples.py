"""The modules reproduce every worked example to six decimals."""

from importlib import import_module

import pytest

from tests.numerics.worked_examples import EXAMPLES, full_name

CASES = [(module, check) for module, checks in EXAMPLES.items() for check in checks]


@pytest.mark.parametrize("module, check", CASES, ids=[f"{module}-{check.__name__}" for module, check in CASES])
def test_worked_example_holds(module, check):
    check(import_module(full_name(module)))
