"""How a planted fault is tried: the check has to fail, and its message has to say why."""

from __future__ import annotations

import re

import pytest


def expect_red(parity, fault, check, says, *, errors=(), **planted):
    """Run ``check`` on an engine with this fault: it must fail, or raise one of ``errors``, and the message say why.

    What ``planted`` names goes to ``parity.planted``. The first line of the message is recorded.
    """
    red = pytest.raises((pytest.fail.Exception, *errors))
    with red as caught, parity.planted(fault, **planted) as faulty:
        check(faulty)
    message = str(caught.value)
    name = fault.rpartition(".")[2]
    parity.note(name, caught_by=getattr(check, "__name__", "check"), message=message.splitlines()[0])
    assert re.search(says, message, re.DOTALL), f"{name}: caught, but not explained as /{says}/:\n{message}"
