"""Everything this package measures about the curvature of one loss in weight space, in one call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.attacks.craft import check_model, check_samples
from flatrock.core.errors import ConfigError, ModelError, ThreatError
from flatrock.core.options import choose, count, weight
from flatrock.core.progress import Progress, Silent
from flatrock.core.rng import Seed
from flatrock.diagnostics.estimate import real, whole
from flatrock.diagnostics.exact import exact_curvature, exact_parts
from flatrock.diagnostics.hessian import Hessian, by_layer, check_network, still
from flatrock.diagnostics.kept import Kept
from flatrock.diagnostics.moments import WHOLE, Moments, layer_part, network_moments, products
from flatrock.diagnostics.pac_bayes import PacBayes, check_scales, pac_bayes
from flatrock.diagnostics.sharpness import AwpRise, LossSurface, SamRise, awp_rise, sam_rise, squared_norm
from flatrock.diagnostics.spectrum import Spectrum, check_spectrum, lanczos_part, spectrum
from flatrock.flatness.tensors import chosen

METHODS = ("auto", "exact", "hutch++", "hutchinson")
# `auto` is exact up to this many parameters, and nobody should wait for more than the second number.
EXACT, TOO_MANY = 12_000, 100_000
# Names under which parts are kept.
AWP, SAM = "awp", "sam"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure. Products with the Hessian: 3 * probes for the whole network and for each layer, runs * steps.

    Without `layers` the trace is estimated on the whole network at once, and is much less certain.
    """

    trace: str = "auto"
    probes: int = 8
    layers: bool = True
    runs: int = 2
    steps: int = 30
    top: int = 5
    gamma: float = 5e-3
    awp_steps: int = 10
    rho: float = 0.05
    sigma0: float = 0.1

    def __post_init__(self) -> None:
        choose("curvature", "trace", self.trace, METHODS)
        # Two draws are the fewest that have a standard error.
        count("curvature", "probes", self.probes, least=2)
        check_spectrum(runs=self.runs, steps=self.steps, top=self.top)
        weight("curvature", "gamma", self.gamma)
        count("curvature", "awp_steps", self.awp_steps, least=1)
        weight("curvature", "rho", self.rho)
        check_scales(sigma0=self.sigma0)

    def method(self, size: int) -> str:
        """How the trace of a network with this many parameters is found."""
        if self.trace == "exact" and size > TOO_MANY:
            raise ConfigError(
                f"the exact trace needs one product per parameter, too many for {size:,} (at most {TOO_MANY:,}); "
                "use --trace hutch++"
            )
        if self.trace != "auto":
            return self.trace
        return "exact" if size <= EXACT else "hutch++"

    @property
    def draws(self) -> dict[str, int]:
        """Options of `moments`: as many products with and without a sketch."""
        if self.trace == "hutchinson":
            return {"sketch": 0, "probes": 3 * self.probes}
        return {"sketch": self.probes, "probes": self.probes}


@dataclass(frozen=True)
class Curvature:
    """What was found for one loss; `products` counts products with the Hessian of the whole network or of a layer."""

    loss: float
    method: str
    whole: Moments
    layers: Mapping[str, Moments]
    spectrum: Spectrum
    awp: AwpRise
    sam: SamRise
    pac_bayes: PacBayes
    products: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values; layers as a list, because JSON objects keep no order."""
        return {**asdict(self), "layers": [[name, asdict(found)] for name, found in self.layers.items()]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Curvature:
        """Inverse of to_dict; ValueError if its parts do not belong together."""
        found = cls(
            loss=real(values["loss"]),
            method=values["method"],
            whole=Moments.from_dict(values["whole"]),
            layers={str(name): Moments.from_dict(found) for name, found in values["layers"]},
            spectrum=Spectrum.from_dict(values["spectrum"]),
            awp=AwpRise.from_dict(values["awp"]),
            sam=SamRise.from_dict(values["sam"]),
            pac_bayes=PacBayes.from_dict(values["pac_bayes"]),
            products=whole(values["products"]),
            seconds=real(values["seconds"], least=0),
        )
        found.check()
        return found

    def check(self) -> None:
        """ValueError if trace, layers and PAC-Bayes do not say the same."""
        trace, parts = self.whole.trace.value, self.layers.values()
        if self.method not in METHODS[1:]:
            raise ValueError(f"unknown method {self.method!r}")
        if parts and sum(part.count for part in parts) != self.whole.count:
            raise ValueError("the layers have other parameters than the whole")
        size = math.fsum(abs(part.trace.value) for part in parts)
        if parts and abs(math.fsum(part.trace.value for part in parts) - trace) > 1e-6 * size:
            raise ValueError(f"the traces of the layers do not add up to that of the whole, {trace}")
        terms = self.pac_bayes
        if terms.risk != self.loss or not math.isclose(terms.trace.value, terms.sigma0**2 / 2 * trace, rel_tol=1e-6):
            raise ValueError(f"the PAC-Bayes terms are not those of a loss of {self.loss} and a trace of {trace}")


def curvature(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    beta: float,
    settings: Settings | None = None,
    attack: Callable[[nn.Module], Tensor] | None = None,
    batch_size: int = 250,
    seed: Seed | None = None,
    task: str = "curvature",
    progress: Progress | None = None,
    kept: Kept | None = None,
) -> Curvature:
    """Curvature of the mean cross-entropy of (x, y) at the model's weights, which are given back bit by bit.

    x are constants: adversarial inputs are attacked once, at these weights, and held fixed. `attack` makes new ones for
    moved weights (AWP's sharpness only). `beta` is PAC-Bayes' temperature, usually the number of training samples.
    Finished parts are `kept`, under names that say nothing of model, samples and settings: those must be the same.
    """
    check_scales(beta=beta)
    check_samples(x, y)
    if x.shape[0] == 0:
        raise ThreatError("there is nothing to measure: x has no samples")
    check_model(model, x)
    count("curvature", "batch_size", batch_size, least=1)
    return _Measurement(
        model, x, y, settings or Settings(), batch_size, seed or Seed(0), task, progress or Silent(), kept or Kept()
    ).take(beta, attack)


class _Measurement:
    """The steps of `curvature`, which share a model, data and a progress bar."""

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        settings: Settings,
        batch_size: int,
        seed: Seed,
        task: str,
        progress: Progress,
        kept: Kept,
    ) -> None:
        self.model, self.x, self.y, self.settings = model, x, y, settings
        self.batch_size, self.seed, self.task, self.progress = batch_size, seed, task, progress
        self.kept = kept
        self.parameters = chosen(model, "all")
        self.size = sum(p.numel() for p in self.parameters.values())
        self.method = settings.method(self.size)
        self.note = ""

    def take(self, beta: float, attack: Callable[[nn.Module], Tensor] | None) -> Curvature:
        begun = time.perf_counter()
        settings, keep, parts = self.settings, self.kept, self._parts()
        total, done = sum(parts.values()), sum(n for name, n in parts.items() if name in keep)
        self.progress.begin(self.task, total * len(self.x), done * len(self.x))
        with still(self.model, self.x, self.y):
            surface = LossSurface(self.model, self.x, self.y, batch_size=self.batch_size)
            loss = surface.value()
            check_network(self.model, self.x, self.y, self.parameters, self.seed.child("symmetry"))
            hessian = self._hessian(self.parameters)
            ends = spectrum(
                hessian,
                runs=settings.runs,
                steps=settings.steps,
                top=settings.top,
                seed=self.seed.child("spectrum"),
                kept=keep,
            )
            self.note = f"largest eigenvalue {ends.largest[0][0]:.4g}"
            whole, layers, diagonal = self._moments(hessian)
            climbed = partial(awp_rise, surface, gamma=settings.gamma, steps=settings.awp_steps, attack=attack)
            awp = keep(AWP, climbed, write=asdict, read=AwpRise.from_dict)
            sam = keep(SAM, partial(sam_rise, surface, hessian, rho=settings.rho), write=asdict, read=SamRise.from_dict)
        self.progress.end()
        bound = pac_bayes(
            risk=loss,
            squared_norm=squared_norm(self.parameters),
            trace=whole.trace,
            sigma0=settings.sigma0,
            beta=beta,
            diagonal=diagonal,
        )
        spent = time.perf_counter() - begun + keep.seconds
        found = Curvature(loss, self.method, whole, layers, ends, awp, sam, bound, total, spent)
        _check_finite(found.to_dict())
        return found

    def _hessian(self, parameters: Mapping[str, Tensor]) -> Hessian:
        return Hessian(self.model, self.x, self.y, parameters, batch_size=self.batch_size, seen=self._seen)

    def _seen(self, samples: int) -> None:
        self.progress.advance(samples, self.note)

    def _moments(self, hessian: Hessian) -> tuple[Moments, dict[str, Moments], Tensor | None]:
        """Of the whole network and of its layers, and the diagonal if it is known."""
        if self.method == "exact":
            loss = F.cross_entropy(self.model(self.x), self.y)
            found = exact_curvature(
                loss, self.parameters, seen=lambda rows: self._seen(rows * len(self.x)), kept=self.kept
            )
            return found.whole, found.layers if self.settings.layers else {}, found.diagonal
        whole, layers = network_moments(
            self._hessian, self._layers(), self.parameters, self.settings.draws, self.seed.child("moments"), self.kept
        )
        return whole, layers, None

    def _layers(self) -> dict[str, dict[str, Tensor]]:
        return by_layer(self.parameters) if self.settings.layers else {}

    def _parts(self) -> dict[str, int]:
        """How many products with the Hessian, or with that of a layer, each part takes that is kept."""
        runs = {lanczos_part(i): min(self.settings.steps, self.size) for i in range(self.settings.runs)}
        if self.method == "exact":
            return {**runs, **exact_parts(self.parameters), SAM: 1}
        sizes = {layer_part(name): sum(p.numel() for p in part.values()) for name, part in self._layers().items()}
        draws = self.settings.draws
        found = {name: products(size, **draws) for name, size in {WHOLE: self.size, **sizes}.items()}
        return {**runs, **found, SAM: 1}


def _check_finite(value: Any, name: str = "") -> None:
    """ModelError with the name of the first number in nested values that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ModelError(
            f"curvature: {name.strip()} is {value}, not finite: the loss or its derivatives overflow at these weights; "
            "measure with --precision double, or other settings"
        )
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in inside:
        _check_finite(part, f"{name} {key}")
