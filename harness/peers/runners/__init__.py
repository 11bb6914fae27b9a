"""What runs inside a peer's own interpreter: one module per peer, and the loop that answers the driver.

May import torch, safetensors and the peer; nothing of the harness (but for the peer that is the harness). Each module
has ``boot(task)``, which returns a :class:`~harness.peers.runners.launch.Runner`.
"""
