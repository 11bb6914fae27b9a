"""The engine side: boot, driver, worker, taps, wire.

May import the vocabulary. vLLM's private attributes are touched in ``internals`` alone.
"""

from __future__ import annotations
