from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.data.augment import (
    MIXING,
    Augmentation,
    crop_shift,
    cutmix,
    cutout,
    mixup,
    random_brightness,
    random_crop,
    random_erasing,
    random_flip,
    random_rotation,
)

EVERYTHING = Augmentation(
    crop=3, crop_fill="reflect", flip=True, cutout=3, rotation=20.0, brightness=0.2, shift=3, erase=0.5
)


def _images(n: int, *, height: int = 9, width: int = 7) -> Tensor:
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(crop=4),
        Augmentation(crop=4, crop_fill="reflect"),
        Augmentation(flip=True),
        Augmentation(cutout=4),
        Augmentation(rotation=15),
        Augmentation(rotation=15, rotation_mode="nearest"),
        Augmentation(brightness=0.3),
        Augmentation(shift=5),
        Augmentation(erase=0.9),
        EVERYTHING,
    ],
    ids=str,
)
def test_what_happens_to_a_sample_does_not_depend_on_its_batch(augmentation: Augmentation, batch_size: int) -> None:
    x, ids = _images(64), torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:64]
    whole = augmentation(x, Seed(3).samples(ids))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    for part in order.split(batch_size):
        assert torch.equal(augmentation(x[part], Seed(3).samples(ids[part])), whole[part])
    assert not torch.equal(augmentation(x, Seed(4).samples(ids)), whole)


def test_result_stays_in_range_and_on_new_memory() -> None:
    x = _images(32).round()
    before = x.clone()
    out = EVERYTHING(x, Seed(0).samples(torch.arange(32)))
    assert float(out.min()) >= 0
    assert float(out.max()) <= 1
    assert out.shape == x.shape
    assert torch.equal(x, before)


def _all_crops(image: Tensor, padding: int, mode: str) -> list[Tensor]:
    padded = F.pad(image[None], [padding] * 4, mode=mode)[0]
    height, width = image.shape[1:]
    span = range(2 * padding + 1)
    return [padded[:, top : top + height, left : left + width] for top in span for left in span]


@pytest.mark.parametrize(("fill", "mode"), [("zero", "constant"), ("reflect", "reflect")])
def test_crop_is_one_of_the_exact_shifts_all_equally_likely(fill: str, mode: str) -> None:
    n, padding = 20_000, 2
    image = _images(1)[0]
    out = random_crop(image.expand(n, -1, -1, -1), Seed(0).samples(torch.arange(n)), padding=padding, fill=fill)  # type: ignore[arg-type]
    shifts = torch.stack(_all_crops(image, padding, mode))
    hit = (out[:, None] == shifts[None]).flatten(2).all(-1)
    assert bool((hit.sum(1) == 1).all())
    counts, expected = hit.sum(0).double(), n / 25
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    # 24 degrees of freedom: above 52 once in a thousand for a fair draw; the draw here is fixed.
    assert chi2 < 52


def test_crop_checks_its_options() -> None:
    gen = Seed(0).samples(torch.arange(2))
    with pytest.raises(ConfigError, match="unknown crop fill 'edge'; known: reflect, zero"):
        random_crop(_images(2), gen, padding=1, fill="edge")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reflect padding must be smaller than the 9x7 images, got 7"):
        random_crop(_images(2), gen, padding=7, fill="reflect")


def _all_shifts(image: Tensor, lines: int) -> dict[tuple[int, ...], tuple[Tensor, float]]:
    """Every outcome by hand, loop by loop, with its probability."""
    height, width = image.shape[1:]
    found = {}
    for off in range(lines + 1):
        for rows_off in range(off + 1):
            columns_off = off - rows_off
            ways = [(t, b) for t in range(rows_off + 1) for b in range(rows_off + 1)]
            across = [(t, b) for t in range(columns_off + 1) for b in range(columns_off + 1)]
            chance = 1 / (lines + 1) / (off + 1) / len(ways) / len(across)
            high, wide = height - rows_off, width - columns_off
            for top, to_row in ways:
                for left, to_column in across:
                    new = torch.zeros_like(image)
                    old = image[:, top : top + high, left : left + wide]
                    new[:, to_row : to_row + high, to_column : to_column + wide] = old
                    found[rows_off, columns_off, top, to_row, left, to_column] = new, chance
    return found


def test_a_shifted_crop_is_one_of_the_outcomes_with_its_probability() -> None:
    n, lines = 20_000, 2
    image = _images(1)[0] + 0.1
    out = crop_shift(image.expand(n, -1, -1, -1), Seed(0).samples(torch.arange(n)), lines=lines)
    outcomes = _all_shifts(image, lines)
    hit = torch.stack([(out == new).flatten(1).all(1) for new, _ in outcomes.values()], 1)
    assert bool((hit.sum(1) == 1).all())
    counts = hit.sum(0).double()
    expected = n * torch.tensor([chance for _, chance in outcomes.values()], dtype=torch.float64)
    assert float(expected.sum()) == pytest.approx(n)
    # 43 outcomes, 42 degrees of freedom: above 77 once in a thousand for a fair draw; the draw here is fixed.
    assert len(outcomes) == 43
    assert float(((counts - expected) ** 2 / expected).sum()) < 77
    with pytest.raises(ConfigError, match="shift must leave something of the 9x7 images, got 7 lines"):
        crop_shift(_images(2), Seed(0).samples(torch.arange(2)), lines=7)


def test_a_rectangle_of_some_samples_is_erased() -> None:
    n = 4000
    x = torch.full((n, 2, 32, 24), 2.0)
    out = random_erasing(x, Seed(0).samples(torch.arange(n)), share=0.6)
    hole = out[:, 0] != 2
    assert torch.equal(hole, out[:, 1] != 2)
    hit = hole.flatten(1).any(1)
    assert abs(int(hit.sum()) - 0.6 * n) < 4 * math.sqrt(n * 0.6 * 0.4)
    rows, columns = hole[hit].any(2).sum(1), hole[hit].any(1).sum(1)
    assert torch.equal(rows * columns, hole[hit].flatten(1).sum(1)), "a full rectangle"
    area = (rows * columns).double() / (32 * 24)
    # Sides are whole numbers and end at the edge of the image.
    assert 0.01 < float(area.min()) < 0.03
    assert 0.31 < float(area.max()) < 0.36
    free = (rows < 32) & (columns < 24)
    assert 0.165 < float(area[free].mean()) < 0.18
    ratio = (rows.double() / columns).log()[free]
    assert abs(float(ratio.mean())) < 0.05
    assert math.log(1 / 0.3) - 0.3 < float(ratio.abs().max()) < math.log(1 / 0.3) + 0.3
    noise = out[out != 2]
    assert 0 <= float(noise.min()) < 0.01
    assert 0.99 < float(noise.max()) < 1
    assert float(noise.mean()) == pytest.approx(0.5, abs=0.01)
    everywhere = hole.double().mean(0)
    assert float(everywhere.min()) > 0, "corners too"
    assert float((everywhere - everywhere.flip(0, 1)).abs().max()) < 0.03
    assert float((out[:, 0] == out[:, 1])[hole].double().mean()) < 0.01, "noise of every channel for itself"


def test_every_change_has_random_numbers_of_its_own() -> None:
    x, gen = _images(64), Seed(0).samples(torch.arange(64))
    assert torch.equal(Augmentation(shift=3)(x, gen), crop_shift(x, gen.child("shift"), lines=3))
    assert torch.equal(Augmentation(erase=1)(x, gen), random_erasing(x, gen.child("erase"), share=1))
    noise = random_erasing(x, gen, share=1)
    assert torch.equal(noise[noise != x], gen.child("noise").uniform(x)[noise != x])
    assert not torch.equal(gen.child("noise").uniform(x), gen.child("where").uniform(x))


def test_flip_mirrors_half_of_the_samples() -> None:
    x = _images(2000)
    out = random_flip(x, Seed(0).samples(torch.arange(2000)))
    same, mirrored = ((out == y).flatten(1).all(1) for y in (x, x.flip(-1)))
    assert bool((same ^ mirrored).all())
    assert abs(int(mirrored.sum()) - 1000) < 75


def test_cutout_zeroes_one_square_fully_inside_at_every_place() -> None:
    n, length = 3000, 4
    out = cutout(torch.ones(n, 2, 9, 7), Seed(0).samples(torch.arange(n)), length=length)
    hole = out == 0
    assert torch.equal(hole[:, 0], hole[:, 1])
    assert hole[:, 0].flatten(1).sum(1).unique().tolist() == [length**2]
    rows, columns = hole[:, 0].any(2), hole[:, 0].any(1)
    assert rows.sum(1).unique().tolist() == [length]
    assert columns.sum(1).unique().tolist() == [length]
    corners = rows.int().argmax(1) * 7 + columns.int().argmax(1)
    assert len(corners.unique()) == (9 - length + 1) * (7 - length + 1)
    with pytest.raises(ConfigError, match="cutout length must fit the 9x7 images, got 8"):
        cutout(_images(2), Seed(0).samples(torch.arange(2)), length=8)


def test_rotation_by_a_known_angle_matches_an_affine_grid() -> None:
    x, gen = _images(5, height=8, width=8), Seed(0).samples(torch.arange(5))
    out = random_rotation(x, gen, degrees=30)
    for i in range(5):
        u = float(gen.uniform(torch.empty(5, 1, dtype=torch.float64))[i])
        angle = (2 * u - 1) * math.radians(30)
        theta = torch.tensor([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0]])
        grid = F.affine_grid(theta[None], [1, 3, 8, 8], align_corners=False)
        expected = F.grid_sample(x[i : i + 1], grid, align_corners=False)
        torch.testing.assert_close(out[i : i + 1], expected, atol=1e-5, rtol=0)


def test_rotation_to_the_nearest_pixel_takes_pixels_as_they_are() -> None:
    """What torchvision's RandomRotation does unless told otherwise: no value between two pixels."""
    x, gen = _images(6, height=9, width=7), Seed(0).samples(torch.arange(6))
    out = random_rotation(x, gen, degrees=30, mode="nearest")
    u = gen.uniform(torch.empty(6, 1, dtype=torch.float64))
    for i, angle in enumerate(((2 * u - 1) * math.radians(30)).squeeze(1).tolist()):
        for row in range(9):
            for column in range(7):
                v, w = row - 4, column - 3
                there = math.sin(angle) * w + math.cos(angle) * v + 4, math.cos(angle) * w - math.sin(angle) * v + 3
                near = round(there[0]), round(there[1])
                if max(abs(there[0] % 1 - 0.5), abs(there[1] % 1 - 0.5)) < 1e-4:
                    continue  # rounding decides
                inside = 0 <= near[0] < 9 and 0 <= near[1] < 7
                expected = x[i, :, near[0], near[1]] if inside else torch.zeros(3)
                assert torch.equal(out[i, :, row, column], expected)
    assert not torch.equal(out, random_rotation(x, gen, degrees=30))
    assert torch.equal(random_rotation(x, gen, degrees=30), random_rotation(x, gen, degrees=30, mode="bilinear"))
    with pytest.raises(ConfigError, match="unknown rotation mode 'cubic'; known: bilinear, nearest"):
        random_rotation(x, gen, degrees=30, mode="cubic")  # type: ignore[arg-type]


def test_rotation_of_an_oblong_image_does_not_shear() -> None:
    # A bright point 3 pixels right of the centre stays 3 pixels away from it, whatever the angle.
    x = torch.zeros(200, 1, 9, 21)
    x[:, 0, 4, 13] = 1
    out = random_rotation(x, Seed(0).samples(torch.arange(200)), degrees=90)
    mass = out.sum((1, 2, 3))
    v = (out.sum((1, 3)) * torch.arange(9.0)).sum(1) / mass - 4
    u = (out.sum((1, 2)) * torch.arange(21.0)).sum(1) / mass - 10
    distance = torch.hypot(u, v)
    assert float((distance - 3).abs().max()) < 0.3
    assert float(torch.atan2(v, u).abs().max()) > 1.4


def test_rotation_of_white_is_never_brighter_than_white() -> None:
    white = torch.ones(256, 3, 9, 7)
    assert float(random_rotation(white, Seed(0).samples(torch.arange(256)), degrees=15).max()) == 1.0


def test_rotation_by_nothing_is_the_identity() -> None:
    x = _images(4)
    torch.testing.assert_close(random_rotation(x, Seed(0).samples(torch.arange(4)), degrees=0.0), x, atol=1e-6, rtol=0)


def test_brightness_adds_one_number_per_image() -> None:
    x = torch.full((500, 3, 4, 4), 0.5)
    shift = random_brightness(x, Seed(0).samples(torch.arange(500)), strength=0.2) - x
    assert float(shift.flatten(1).std(1).max()) < 1e-6
    assert -0.2 <= float(shift.min()) < -0.19
    assert 0.19 < float(shift.max()) <= 0.2 + 1e-6
    bright = random_brightness(torch.ones(50, 1, 2, 2), Seed(0).samples(torch.arange(50)), strength=1.0)
    assert float(bright.max()) == 1.0


def test_mixup_is_one_convex_combination_for_the_batch() -> None:
    x, y = _images(16), F.one_hot(torch.arange(16) % 5, 5).float()
    mixed, soft = mixup(x, y, Seed(7), alpha=1.4)
    partner = Seed(7).child("partner").permutation(16)
    moved = (partner != torch.arange(16)) & (y.argmax(1) != y[partner].argmax(1))
    share = soft[moved].gather(1, y[moved].argmax(1, keepdim=True)).unique()
    assert len(share) == 1
    lam = float(share)
    assert 0 < lam < 1
    torch.testing.assert_close(mixed, lam * x + (1 - lam) * x[partner], atol=1e-6, rtol=0)
    torch.testing.assert_close(soft.sum(1), torch.ones(16))
    again = mixup(x, y, Seed(7), alpha=1.4)
    assert torch.equal(mixed, again[0])
    assert not torch.equal(mixed, mixup(x, y, Seed(8), alpha=1.4)[0])


def test_mixup_share_follows_the_beta_distribution() -> None:
    x, y = torch.tensor([[0.0], [1.0]]), torch.eye(2)
    shares = []
    for key in range(600):
        mixed, _ = mixup(x, y, Seed(key), alpha=0.5)
        if float(Seed(key).child("partner").permutation(2)[0]) == 1:
            shares.append(float(mixed[1, 0]))
    values = torch.tensor(shares)
    # Beta(a, a): mean 1/2, variance 1/(4 (2a + 1)) = 1/8.
    assert abs(float(values.mean()) - 0.5) < 0.06
    assert abs(float(values.var()) - 1 / 8) < 0.02
    with pytest.raises(ConfigError, match="mixup alpha must be above 0, got 0"):
        mixup(x, y, Seed(0), alpha=0)


def test_mixing_does_not_touch_the_global_generators() -> None:
    before = torch.get_rng_state()
    for work in MIXING.values():
        work(_images(4), torch.eye(4), Seed(0), alpha=1.0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("key", range(40))
def test_cutmix_pastes_one_rectangle_and_mixes_labels_by_its_pixels(key: int) -> None:
    x, y = _images(12), F.one_hot(torch.arange(12) % 5, 5).float()
    mixed, soft = cutmix(x, y, Seed(key), alpha=1.0)
    partner = Seed(key).child("partner").permutation(12)
    swapped = (mixed != x).any(1)  # [n, H, W]
    moved = (partner != torch.arange(12)).nonzero().squeeze(1).tolist()
    where = swapped[moved[0]]
    rows, columns = where.any(1).nonzero().squeeze(1), where.any(0).nonzero().squeeze(1)
    filled = torch.zeros_like(where)
    if rows.numel():
        filled[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = True
    assert torch.equal(where, filled), "a rectangle"
    for i in range(12):
        assert torch.equal(mixed[i], torch.where(where, x[partner[i]], x[i])), "the same one for all"
    share = float(where.double().mean())
    torch.testing.assert_close(soft, (1 - share) * y + share * y[partner], atol=1e-6, rtol=0)
    assert torch.equal(cutmix(x, y, Seed(key), alpha=1.0)[0], mixed)


def test_cutmix_has_the_published_law() -> None:
    """1 - lambda of U(0, 1) is the area if nothing is cut off: then sides are sqrt(1 - lambda) of the image's."""
    x, y = torch.stack([torch.zeros(1, 40, 40), torch.ones(1, 40, 40)]), torch.eye(2)
    areas, middles = [], []
    for key in range(500):
        drawn = np.random.default_rng(Seed(key).child("lambda").key)
        part, v, u = math.sqrt(1 - drawn.beta(1.0, 1.0)), drawn.random(), drawn.random()
        middles.append((v, u))
        mixed, soft = cutmix(x, y, Seed(key), alpha=1.0)
        if int(Seed(key).child("partner").permutation(2)[0]) == 0:
            continue
        side, top, left = int(40 * part), int(40 * v), int(40 * u)
        rows = min(top - side // 2 + side, 40) - max(top - side // 2, 0)
        columns = min(left - side // 2 + side, 40) - max(left - side // 2, 0)
        assert int(mixed[0].sum()) == rows * columns
        assert float(soft[0, 1]) == pytest.approx(rows * columns / 1600, abs=1e-6)
        areas.append(part**2)
    assert abs(sum(areas) / len(areas) - 0.5) < 0.06
    assert abs(sum(v for v, _ in middles) / 500 - 0.5) < 0.05


def test_cutmix_is_for_images_and_a_number_above_0() -> None:
    with pytest.raises(ConfigError, match="cutmix alpha must be above 0, got 0"):
        cutmix(_images(4), torch.eye(4), Seed(0), alpha=0)
    with pytest.raises(ConfigError, match=r"cutmix needs images \[n, C, H, W\], got shape \(4, 2\); use mixup"):
        cutmix(torch.rand(4, 2), torch.eye(4), Seed(0), alpha=1)


def test_no_augmentation_returns_the_batch_of_any_shape() -> None:
    x = torch.rand(4, 2, generator=torch.Generator().manual_seed(0))
    assert Augmentation()(x, Seed(0).samples(torch.arange(4))) is x
    assert Augmentation(crop_fill="reflect")(x, Seed(0).samples(torch.arange(4))) is x
    with pytest.raises(ConfigError, match=r"needs images \[n, C, H, W\], got shape \(4, 2\)"):
        Augmentation(flip=True)(x, Seed(0).samples(torch.arange(4)))


def test_each_part_draws_its_own_numbers() -> None:
    x, gen = _images(64), Seed(0).samples(torch.arange(64))
    both = Augmentation(flip=True, crop=2)(x, gen)
    assert torch.equal(both, random_flip(random_crop(x, gen.child("crop"), padding=2), gen.child("flip")))


def test_wrong_options_are_all_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        Augmentation(crop=-1, cutout=-2, rotation=200.0, brightness=1.5, crop_fill="edge")  # type: ignore[arg-type]
    assert len(caught.value.faults) == 5
    assert "rotation must lie in 0..180, got 200.0" in str(caught.value)
    assert "unknown crop fill 'edge'" in str(caught.value)


@pytest.mark.gpu
def test_device_draws_the_same_crops_flips_and_holes() -> None:
    x, ids = _images(64), torch.arange(64)
    augmentation = Augmentation(crop=3, flip=True, cutout=3, brightness=0.2)
    on_gpu = augmentation(x.cuda(), Seed(0).samples(ids.cuda()))
    assert torch.equal(on_gpu.cpu(), augmentation(x, Seed(0).samples(ids)))
    turn = Augmentation(rotation=15)
    turned = turn(x.cuda(), Seed(0).samples(ids.cuda())).cpu()
    torch.testing.assert_close(turned, turn(x, Seed(0).samples(ids)), atol=1e-5, rtol=0)
