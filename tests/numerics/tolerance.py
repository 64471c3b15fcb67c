"""Comparison with numbers given to six decimals."""

import numpy as np
from numpy.testing import assert_allclose

TOLERANCE = 1.01e-6  # the examples are given to six decimals


def close(actual, expected, tolerance=TOLERANCE):
    assert_allclose(np.asarray(actual, dtype=np.float64), expected, rtol=0, atol=tolerance)
