"""The Hugging Face side: load, hook, truth.

May import the vocabulary and ``harness.models``; knows nothing of vLLM.
"""

from __future__ import annotations
