"""Settings for all tests, before any framework is imported."""

import os

from hypothesis import settings

# The tests compile hundreds of tiny JAX programs; optimising them takes longer than running them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# The same examples in every run, and no deadline: a busy machine is no fault of the code.
settings.register_profile("attnspan", derandomize=True, deadline=None)
settings.load_profile("attnspan")
