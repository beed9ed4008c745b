"""The objectives by name."""

from __future__ import annotations

from flatrock.core.registry import Registry
from flatrock.core.types import Objective
from flatrock.objectives.alp import ALP
from flatrock.objectives.at import AT
from flatrock.objectives.gat import GAT
from flatrock.objectives.hat import HAT
from flatrock.objectives.mart import MART
from flatrock.objectives.standard import Standard
from flatrock.objectives.trades import TRADES

OBJECTIVES: Registry[Objective] = Registry("objective")
OBJECTIVES.add("standard", Standard, "cross-entropy on clean inputs, no attack")
OBJECTIVES.add("at", AT, "cross-entropy on adversarial inputs", cite="Madry 2018")
OBJECTIVES.add("trades", TRADES, "clean cross-entropy plus beta times KL(clean || adversarial)", cite="Zhang 2019")
OBJECTIVES.add("hat", HAT, "trades plus gamma times cross-entropy beyond x' with a helper's labels", cite="Rade 2022")
OBJECTIVES.add("gat", GAT, "clean cross-entropy plus squared distance of the two answers", cite="Sriramanan 2020")
OBJECTIVES.add("mart", MART, "boosted adversarial cross-entropy plus misclassification-weighted KL", cite="Wang 2020")
OBJECTIVES.add("alp", ALP, "adversarial cross-entropy plus squared distance of the logit pair", cite="Kannan 2018")
