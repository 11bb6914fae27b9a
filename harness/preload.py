"""Imported once by the fork server, so that each engine's process starts with torch and vLLM already in memory."""

from __future__ import annotations

import contextlib

import torch
import transformers

import harness.transport

with contextlib.suppress(ImportError):  # a machine with only the reference side can still run it
    import vllm  # noqa: F401
    import vllm.entrypoints.llm

__all__ = ["harness", "torch", "transformers"]
