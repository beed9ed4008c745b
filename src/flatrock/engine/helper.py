"""HAT's helper: a network trained without attacks that says what adversarial inputs look like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.core.errors import in_words
from flatrock.core.tensorfile import weights_digest
from flatrock.core.types import Help
from flatrock.models.classifier import Classifier
from flatrock.models.twin import faithful, probe_inputs


class Helper:
    """Labels x' for training at x_h = x + reach * (x' - x). Its network stays as it is, in eval mode.

    `fast` asks a float16 copy of it. `about` tells where it comes from; `findings`, by code, what could not be done.
    """

    def __init__(
        self, network: Classifier, *, reach: float, fast: bool = False, about: Mapping[str, Any] | None = None
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self.reach = reach
        self.about = dict(about or {})
        self.digest = weights_digest(network)
        self.findings: dict[str, str] = {}
        self._asked: nn.Module = network
        if fast:
            try:
                self._asked = faithful(network, probe_inputs(network))
            except Exception as error:  # of a network or a machine the copy was not written for
                self._without_copy(f"cannot be made ({in_words(error)})")

    @torch.no_grad()
    def __call__(self, x: Tensor, x_adv: Tensor) -> Help:
        """Inputs as far as `reach` times the attack, not clipped, and the class each adversarial input has here."""
        return Help(x + self.reach * (x_adv - x), self._asked(x_adv).argmax(1))

    @torch.no_grad()
    def check(self, x: Tensor) -> None:
        """Look whether the copy's numbers fit float16 on this batch (a wait for a GPU); from then on without it if not.

        The largest of logits that are not finite is a class too, and nobody would notice.
        """
        if self._asked is not self.network and not bool(torch.isfinite(self._asked(x)).all()):
            self._without_copy("overflows")

    def plain(self) -> Helper:
        """The same without the copy."""
        return Helper(self.network, reach=self.reach, about=self.about)

    def _without_copy(self, why: str) -> None:
        self.findings["T05"] = f"the helper's float16 copy {why}; the network itself is asked"
        self._asked = self.network
