"""Atoll as a library: a script's own training loop as a peer of a swarm. See docs/library.md."""

from importlib.metadata import version

from peer.errors import AtollError, UserError
from peer.free_weights import save_weights
from peer.use.swarm import Swarm

__all__ = ["AtollError", "Swarm", "UserError", "__version__", "save_weights"]
__version__ = version("atoll")
