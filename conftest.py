"""Makes `pytest suites/` work from a clone that is not installed, and sets how Hypothesis looks for examples.

`HYPOTHESIS_PROFILE` chooses a profile: `dev` (default), `ci` (default where CI is set), `nightly`, or `mutants`, for
the same tests over and over in one process.
"""

from __future__ import annotations

import os

pytest_plugins = ["harness.pytest_plugin"]

try:
    from hypothesis import HealthCheck, Phase, settings
except ImportError:  # only the unit tests use it, and only the extra `dev` brings it
    pass
else:
    # No deadlines anywhere: the first example of a test often pays for an import or a compilation.
    settings.register_profile("dev", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
    settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
    settings.register_profile(
        "mutants",
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=20,
        phases=[Phase.explicit, Phase.generate],  # no shrinking: that a test fails is enough
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))
