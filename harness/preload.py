"""Imported once by the fork server, so that each engine's process starts with torch and vLLM already in memory."""

from __future__ import annotations

import contextlib
import importlib

import torch
import transformers

import harness.transport

with contextlib.suppress(ImportError):  # a machine with only the reference side can still run it
    # By name, so that no linter takes the imports for unused: having them in memory is all they are for.
    importlib.import_module("vllm.entrypoints.llm")

__all__ = ["harness", "torch", "transformers"]
