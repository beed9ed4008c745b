"""Curvature as tables and pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flatrock.core.errors import ConfigError
from flatrock.diagnostics.curvature import Curvature
from flatrock.diagnostics.curvature_record import CurvatureRecord
from flatrock.diagnostics.estimate import Estimate
from flatrock.diagnostics.moments import Moments, known_moments
from flatrock.diagnostics.pac_bayes import pac_bayes
from flatrock.diagnostics.sharpness import AwpRise, SamRise
from flatrock.diagnostics.spectrum import Spectrum
from flatrock.reports.curvature import (
    bound_table,
    caption,
    check_alike,
    curvature_table,
    draw_layers,
    draw_spectra,
    labels,
    sharpness_table,
)

HOW = {"probes": 8, "gamma": 0.005, "awp_steps": 10, "rho": 0.05, "sigma0": 0.1, "beta": 512}


def found(trace: float, *, layers: int = 3, anew: float | None = None) -> Curvature:
    whole = Moments(100, Estimate(trace, 1.25, 8), Estimate(50.0, 2.0, 8), Estimate(0.7, 0.01, 8))
    return Curvature(
        loss=0.5,
        method="hutch++",
        whole=whole,
        layers={f"layer{i}": known_moments(10, trace / (i + 2), 5.0) for i in range(layers)},
        spectrum=Spectrum(
            ((9.0, 1e-9), (3.0, 0.5)), ((-0.4, 0.01), (0.0, 0.1)), (-0.4, 0.0, 3.0, 9.0), (0.25,) * 4, 2, 30
        ),
        awp=AwpRise(0.005, 10, 0.0321, anew),
        sam=SamRise(0.05, 0.0123, 0.0124, 0.3),
        pac_bayes=pac_bayes(risk=0.5, squared_norm=64.0, trace=whole.trace, sigma0=0.1, beta=512),
        products=100,
        seconds=1.0,
    )


def record(run: str = "a", *, trace: float = 30.0, checkpoint: str = "best", **changes: Any) -> CurvatureRecord:
    return CurvatureRecord(
        losses={"clean": found(trace), "adversarial": found(2 * trace, anew=0.04)},
        threat={"norm": "linf", "eps": 8 / 255},
        attack={"name": "pgd-10"},
        settings=HOW,
        provenance={
            "run": run,
            "checkpoint": f"{checkpoint}.safetensors",
            "data": "digits train, 500 of 1097 samples",
            "seed": 0,
            "precision": "single",
            "device": "cpu",
            **changes,
        },
    )


def test_the_tables_have_every_number_and_its_error() -> None:
    records = [record(), record("b", trace=3.0)]
    table = curvature_table(records, "clean")
    assert table.header == ("run", "loss", "sum (trace)", "spread", "largest", "smallest")
    assert table.rows[0] == ("a", "0.5000", "30.0 ± 1.2", "0.700 ± 0.010", "9", "-0.400 ± 0.010")
    sharp = sharpness_table(records)
    assert sharp.rows[0] == ("a, clean", "0.0321", "", "0.0123", "0.0124")
    assert sharp.rows[3][:3] == ("b, adv.", "0.0321", "0.0400")
    bound = bound_table(records)
    assert bound.rows[0][:4] == ("a, clean", "0.5000", "6.250", "0.1500 ± 0.0063")
    assert bound.rows[0][4:] == ("6.900", "1.936 at 0.254")
    assert "log form" not in bound.header
    exact = record()
    exact = replace(exact, losses={k: _with_log(v) for k, v in exact.losses.items()})
    assert bound_table([exact]).header[4] == "log form"
    assert bound_table([exact]).rows[0][4] == "0.1234"


def _with_log(found: Curvature) -> Curvature:
    return replace(found, pac_bayes=replace(found.pac_bayes, logarithm=0.1234))


def test_what_is_not_finite_is_named() -> None:
    lost = found(1.0)
    lost = replace(lost, awp=AwpRise(1e30, 10, None), sam=SamRise(1e30, None, None, 0.3))
    rows = sharpness_table([replace(record(), losses={"clean": lost, "adversarial": lost})]).rows
    assert rows[0][1:] == ("not finite", "", "not finite", "not finite")
    assert rows[1][1:] == ("not finite",) * 4


def test_names_tell_records_apart() -> None:
    assert labels([record("a"), record("b")]) == ["a", "b"]
    assert labels([record("a"), record("a", checkpoint="last")]) == ["a best", "a last"]
    assert labels([record("a"), record("a"), record("b")]) == ["a best", "a best (2)", "b best"]
    assert labels([replace(record("a"), marks=("test-selected",))]) == ["a*"]


def test_the_caption_says_what_was_measured() -> None:
    text = caption([record()])
    for part in ("digits train, 500 of 1097", "pgd-10, linf eps 8/255", "hutch++, 8 probes", "2 Lanczos runs of 30"):
        assert part in text
    assert "gamma 0.005, 10 steps" in text
    few = replace(found(1.0), method="hutchinson", whole=replace(found(1.0).whole, trace=Estimate(1.0, 0.1, 6)))
    sure = replace(few, whole=known_moments(10, 1.0, 2.0), method="exact")
    mixed = caption([replace(record(), losses={"clean": few, "adversarial": sure})])
    assert "trace hutchinson, 6 probes or exact; 2 Lanczos" in mixed
    assert "* chosen" not in text
    assert "* chosen on the test set" in caption([replace(record(), marks=("test-selected",))])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (replace(record("b"), threat={"norm": "l2", "eps": 1.0}), "threat"),
        (replace(record("b"), attack={"name": "fgsm"}), "attack"),
        (record("b", data="digits test, 500 of 500 samples"), "data"),
        (record("b", precision="double"), "precision"),
        (record("b", seed=1), "seed"),
        (replace(record("b"), settings={**HOW, "gamma": 0.01}), "gamma"),
        (replace(record("b"), settings={**HOW, "rho": 0.01}), "rho"),
        (replace(record("b"), settings={**HOW, "beta": 64}), "beta"),
    ],
)
def test_only_alike_records_are_compared(other: CurvatureRecord, what: str) -> None:
    with pytest.raises(ConfigError, match=f"curvatures of different {what} are not compared"):
        check_alike([record(), other])


def test_a_refusal_has_values_and_a_cure() -> None:
    other = replace(record("b"), settings={**HOW, "awp_steps": 3})
    with pytest.raises(ConfigError, match=r"different awp_steps .*: 10 and 3; measure all with one --awp-steps"):
        check_alike([record(), other])
    check_alike([record(), record("b", device="cuda", checkpoint="last")])


def test_nothing_to_show_is_said() -> None:
    with pytest.raises(ConfigError, match="no curvature to show"):
        check_alike([])


@pytest.mark.parametrize("count", [1, 4, 9])
def test_pictures(tmp_path: Path, count: int) -> None:
    records = [record(f"run{i}", trace=10.0 * (i + 1)) for i in range(count)]
    for draw in (draw_spectra, draw_layers):
        file = draw(records, tmp_path / f"{draw.__name__}.png")
        with Image.open(file) as image:
            assert min(image.size) > 300
            assert len(image.convert("RGB").resize((60, 30)).getcolors(10_000) or []) > 5


def test_a_negative_trace_is_drawn_on_a_plain_axis(tmp_path: Path) -> None:
    assert draw_layers([record(trace=-2.0)], tmp_path / "x.png").is_file()


def test_networks_with_other_layers_are_not_drawn_together(tmp_path: Path) -> None:
    other = replace(record("b"), losses={k: found(1.0, layers=2) for k in ("clean", "adversarial")})
    with pytest.raises(ConfigError, match="b has other layers than a"):
        draw_layers([record(), other], tmp_path / "x.png")
    renamed = replace(found(1.0), layers={f"block{i}": known_moments(10, 1.0, 5.0) for i in range(3)})
    with pytest.raises(ConfigError, match="b has other layers than a"):
        draw_layers([record(), replace(other, losses=dict.fromkeys(other.losses, renamed))], tmp_path / "x.png")
