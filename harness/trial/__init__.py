"""The harness on trial: faults of known size in the captures of a sound engine, and what the verdict makes of them.

`kinds` plants, `sweep` tries, `records` reads runs back, `tables` and `figure` show. `spread` is about sound engines,
how near they come to their bounds. Only suites and the command import it; it imports `parity`, `store` and `points`.
"""

from __future__ import annotations
