"""The flatness methods by name."""

from __future__ import annotations

from flatrock.core.hooks import Flatness
from flatrock.core.registry import Registry
from flatrock.flatness.awp import AWP
from flatrock.flatness.rat import RAT
from flatrock.flatness.s2o import S2O
from flatrock.flatness.sam import SAM
from flatrock.flatness.swa import SWA
from flatrock.flatness.trh import TrH

FLATNESS: Registry[Flatness] = Registry("flatness method")
FLATNESS.add("awp", AWP, "the loss at the worst weights nearby, layer by layer", cite="Wu 2020")
FLATNESS.add("rat", RAT, "weight noise in the attack, Taylor terms of it in the loss", cite="Jin 2023")
FLATNESS.add("trh", TrH, "trace of the loss Hessian as a penalty, in closed form for the top layer", cite="Wang 2023")
FLATNESS.add("s2o", S2O, "soft labels from second-order statistics of the logits", cite="Jin 2022")
FLATNESS.add("swa", SWA, "averaged weights beside the raw ones", cite="Izmailov 2018")
FLATNESS.add("sam", SAM, "the loss at the worst weights in one ball around all of them", cite="Foret 2021")
