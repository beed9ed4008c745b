"""Broken samples as pictures: which are shown, how differences are drawn, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.records import Result
from flatrock.core.threat import Linf
from flatrock.data.catalog import load_data
from flatrock.evaluation.evaluate import evaluate
from flatrock.reports.gallery import gallery


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Any]]]:
    """What is put on paper: images, texts and captions."""
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    seen: dict[str, list[Any]] = {"images": [], "titles": [], "captions": []}
    image, title, label = Axes.imshow, Axes.set_title, Figure.supxlabel

    def imshow(self: Any, pixels: Any, **more: Any) -> Any:
        seen["images"].append(torch.tensor(pixels))
        return image(self, pixels, **more)

    def set_title(self: Any, text: str, **more: Any) -> Any:
        seen["titles"].append(text)
        return title(self, text, **more)

    def supxlabel(self: Any, text: str, **more: Any) -> Any:
        seen["captions"].append(" ".join(text.split()))
        return label(self, text, **more)

    monkeypatch.setattr(Axes, "imshow", imshow)
    monkeypatch.setattr(Axes, "set_title", set_title)
    monkeypatch.setattr(Figure, "supxlabel", supxlabel)
    yield seen


def made(channels: int = 1, *, broken: int = 3, n: int = 8) -> tuple[Tensor, Result]:
    """The first `broken` samples are broken, by `a` and `plan/b` in turn; the last is wrong without attack."""
    x = torch.full((n, channels, 4, 5), 0.5)
    x_adv = x.clone()
    clean = torch.ones(n, dtype=torch.bool)
    clean[-1] = False
    a, b = clean.clone(), clean.clone()
    for row in range(broken):
        (a if row % 2 == 0 else b)[row] = False
        x_adv[row, 0, 0, 0], x_adv[row, 0, 0, 1] = 0.5 + 0.01, 0.5 - 0.02
    margins = {"clean": torch.full((n,), 1.5), "worst": torch.full((n,), -0.25)}
    flags = {"clean": clean, "a": a, "plan/b": b}
    threat = {"norm": "linf", "eps": 0.1}
    predictions = torch.arange(n) % 3
    plans: dict[str, tuple[str, ...]] = {"plan": ("plan/b",)}
    result = Result(threat, flags, predictions, plans=plans, margins=margins, adversarial=x_adv)
    return x, result


@pytest.mark.parametrize("channels", [1, 3])
def test_clean_adversarial_and_ten_times_the_difference(
    shown: dict[str, list[Any]], tmp_path: Path, channels: int
) -> None:
    x, result = made(channels)
    path = gallery(x, result, tmp_path / "gallery.png")
    assert path.is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["gallery.png"]
    assert len(shown["images"]) == 9
    clean, adversarial, difference = shown["images"][:3]
    assert clean.shape == ((4, 5) if channels == 1 else (4, 5, 3))
    assert bool((clean == 0.5).all())
    adversarial, difference = (image.reshape(4, 5, channels)[0, :3, 0] for image in (adversarial, difference))
    assert adversarial.tolist() == pytest.approx([0.51, 0.48, 0.5])
    assert difference.tolist() == pytest.approx([0.6, 0.3, 0.5], abs=1e-5)


def test_each_sample_says_what_it_is(shown: dict[str, list[Any]], tmp_path: Path) -> None:
    x, result = made()
    gallery(x, result, tmp_path / "g.png", names=["cat", "dog", "frog"])
    assert shown["titles"] == ["cat\n+1.50 to -0.25\na", "dog\n+1.50 to -0.25\nb", "frog\n+1.50 to -0.25\na"]
    gallery(x, result, tmp_path / "g.png", count=1)
    assert shown["titles"][3] == "0\n+1.50 to -0.25\na"
    (first, second) = shown["captions"]
    assert first.startswith("3 of 3 broken samples.")
    assert second.startswith("1 of 3 broken samples.")
    assert "Differences are x10 around grey" in first
    assert "linf eps 0.1" in first


@pytest.mark.parametrize(("broken", "count", "expected"), [(2, 10, 2), (7, 3, 3), (7, 7, 7), (1, 1, 1)])
def test_no_more_samples_than_there_are(
    shown: dict[str, list[Any]], tmp_path: Path, broken: int, count: int, expected: int
) -> None:
    x, result = made(broken=broken)
    gallery(x, result, tmp_path / "g.png", count=count)
    assert len(shown["titles"]) == expected


def test_many_samples_take_several_blocks(tmp_path: Path) -> None:
    x, result = made(broken=23, n=30)
    sizes = []
    for count in (10, 23):
        with Image.open(gallery(x, result, tmp_path / "g.png", count=count)) as picture:
            sizes.append(picture.size)
    assert sizes[1][0] == sizes[0][0]
    assert sizes[1][1] == pytest.approx(3 * sizes[0][1], abs=3)


@pytest.mark.parametrize(("largest", "factor"), [(0.02, 10), (0.05, 10), (0.06, 5), (0.1, 5), (0.2, 2), (0.3, 1)])
def test_differences_are_drawn_as_large_as_they_fit(
    shown: dict[str, list[Any]], tmp_path: Path, largest: float, factor: int
) -> None:
    x, result = made()
    assert result.adversarial is not None
    result.adversarial[0, 0, 0, 0] = 0.5 + largest
    gallery(x, replace(result, threat={"norm": "linf", "eps": 0.4}), tmp_path / "g.png")
    assert float(shown["images"][2].max()) == pytest.approx(0.5 + factor * largest, abs=1e-6)
    assert f"Differences are x{factor} around grey." in shown["captions"][0]


def test_differences_beyond_any_scale_are_clipped(shown: dict[str, list[Any]], tmp_path: Path) -> None:
    x, result = made()
    assert result.adversarial is not None
    x[0, 0, 0, 0], result.adversarial[0, 0, 0, 0] = 0.1, 0.9
    gallery(x, replace(result, threat={"norm": "linf", "eps": 0.9}), tmp_path / "g.png")
    assert float(shown["images"][2].max()) == 1.0


def test_digits(shown: dict[str, list[Any]], tmp_path: Path, digits_model: nn.Module) -> None:
    data = load_data("digits", "test")
    x, y = data.images(torch.arange(60)), data.y[:60]
    result = evaluate(digits_model, x, y, Linf(0.15), attacks=["fgsm", "pgd-5"], keep_adversarial=True)
    gallery(x, result, tmp_path / "g.png", count=4, names=data.class_names)
    rows = (result.flags["clean"] & ~result.worst).nonzero().squeeze(1)
    picked = rows[torch.linspace(0, len(rows) - 1, 4).long()]
    assert [t.split("\n")[0] for t in shown["titles"]] == [str(int(y[i])) for i in picked]
    assert all(t.split("\n")[2] in ("fgsm", "pgd-5") for t in shown["titles"])
    assert torch.equal(shown["images"][0], x[picked[0], 0])


# What is refused


@pytest.mark.parametrize("shape", [(8, 12), (8, 4, 5), (8, 2, 4, 5), (8, 4, 4, 5)])
def test_only_images_are_drawn(tmp_path: Path, shape: tuple[int, ...]) -> None:
    _, result = made()
    with pytest.raises(ConfigError, match=r"\[n, 1 or 3, height, width\]; inputs of shape \(.*\) are not images"):
        gallery(torch.zeros(shape), result, tmp_path / "g.png")


def test_a_result_without_its_inputs(tmp_path: Path) -> None:
    x, result = made()
    with pytest.raises(StateError, match="keep_adversarial=True"):
        gallery(x, replace(result, adversarial=None), tmp_path / "g.png")


def test_other_inputs_than_those_evaluated(tmp_path: Path) -> None:
    x, result = made()
    with pytest.raises(ConfigError, match="the result is about"):
        gallery(x[:-1], result, tmp_path / "g.png")
    with pytest.raises(ConfigError, match=r"differ by more than linf eps 0\.1; give the x that was evaluated"):
        gallery(x + 0.2, result, tmp_path / "g.png")


def test_nothing_broken(tmp_path: Path) -> None:
    x, result = made(broken=0)
    with pytest.raises(StateError, match="no attack broke a sample"):
        gallery(x, result, tmp_path / "g.png")


def test_names_and_count_are_checked(tmp_path: Path) -> None:
    x, result = made()
    with pytest.raises(ConfigError, match="2 names for at least 3 classes"):
        gallery(x, result, tmp_path / "g.png", names=["cat", "dog"])
    with pytest.raises(ConfigError, match="gallery count must be a whole number >= 1, got 0"):
        gallery(x, result, tmp_path / "g.png", count=0)
    assert list(tmp_path.iterdir()) == []
