"""Property tests draw the same examples in every run and have no deadline on a busy machine."""

from hypothesis import settings

settings.register_profile("numerics", deadline=None, derandomize=True, database=None)
settings.load_profile("numerics")
