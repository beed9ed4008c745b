"""flatrock: robust image classifiers in flat minima, measured honestly and fast."""

from flatrock.core.provenance import VERSION as __version__
from flatrock.core.threat import L2, Linf

__all__ = ["L2", "Linf", "__version__"]
