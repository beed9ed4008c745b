"""Row sums, class matrices and the loss against soft labels: loops over numbers, autograd and golden values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatrock.core.rng import Seed
from flatrock.core.types import View, Views
from flatrock.flatness.soft_labels import both_passes, class_matrix, label_rows, row_sums, s2o_matrix, soft_kl
from flatrock.models.catalog import create_model

W = torch.tensor([[1, -0.5], [0.25, 0.75], [-1, 0.5]], dtype=torch.float64)
FEATURES = torch.tensor([[1, 2], [0.5, -1]], dtype=torch.float64)
LABELS = torch.tensor([0, 2])


def randn(*shape: int, name: str = "x") -> Tensor:
    return torch.randn(*shape, generator=Seed(0).child(name).generator(), dtype=torch.float64)


def close(a: Tensor, b: object, tolerance: float = 1e-12) -> bool:
    return torch.allclose(a, torch.as_tensor(b, dtype=a.dtype), rtol=0, atol=tolerance)


# Labels


def test_label_rows_of_indices() -> None:
    rows, share = label_rows(torch.tensor([2, -1, 0]), 3)
    assert rows.tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]
    assert share.tolist() == [1, 0, 1]


def test_label_rows_of_probabilities() -> None:
    mixed = torch.tensor([[0.25, 0.75], [1, 0]], dtype=torch.float64)
    rows, share = label_rows(mixed, 2)
    assert rows is mixed
    assert share.tolist() == [1, 1]


def test_both_passes() -> None:
    view = View(FEATURES, FEATURES)
    assert both_passes(Views(view, view)) == (view, view)
    for views in (Views(None, view), Views(view, None)):
        with pytest.raises(RuntimeError, match="not given both"):
            both_passes(views)


# Row sums


def test_golden_row_sums() -> None:
    r = row_sums(FEATURES, FEATURES @ W.T, LABELS)
    assert close(r, [-1.49421939, 1.07618194, 0.41803745], 5e-9)
    assert abs(float(r.sum())) < 1e-15


@pytest.mark.parametrize("labels", ["hard", "unlabeled", "mixed"])
@pytest.mark.parametrize("training", [True, False])
def test_row_sums_equal_autograd_through_a_network(labels: str, training: bool) -> None:
    model = create_model("digits_cnn").double().train(training)
    x = torch.rand(12, 1, 8, 8, generator=Seed(0).child("images").generator(), dtype=torch.float64)
    y = torch.arange(12) % 10
    if labels == "unlabeled":
        y[[0, 5, 11]] = -1
    if labels == "mixed":
        y = 0.3 * F.one_hot(y, 10).double() + 0.7 * F.one_hot((y + 3) % 10, 10).double()
    view = model.view(x)
    loss = F.cross_entropy(view.logits, y, **({"ignore_index": -1} if labels == "unlabeled" else {}))
    (gradient,) = torch.autograd.grad(loss, model.head.weight)
    r = row_sums(view.features, view.logits, y)
    assert close(r, gradient.sum(1), 1e-14)
    assert float(r.abs().max()) > 1e-3
    assert not r.requires_grad


def test_row_sums_without_labels_are_zero() -> None:
    assert row_sums(FEATURES, FEATURES @ W.T, torch.tensor([-1, -1])).tolist() == [0, 0, 0]


def test_one_hot_rows_are_hard_labels() -> None:
    logits, features, y = randn(6, 4), randn(6, 7, name="f"), torch.arange(6) % 4
    one_hot = F.one_hot(y, 4).double()
    assert close(row_sums(features, logits, y), row_sums(features, logits, one_hot), 1e-15)
    matrix = class_matrix(randn(4, name="v"))
    assert close(soft_kl(matrix, y, logits), soft_kl(matrix, one_hot, logits), 1e-15)


# Class matrices


def loop_matrix(v: list[float], cc: float) -> list[list[float]]:
    """Row by row as the official code fills it; only for vectors that leave every row some mass."""
    low = min(v)
    shares = [(value - low) / sum(w - low for w in v) for value in v]
    matrix = []
    for k in range(len(v)):
        row = [0.0 if j == k else share for j, share in enumerate(shares)]
        row = [cc * value / sum(row) for value in row]
        row[k] = 1 - cc
        matrix.append(row)
    return matrix


def test_golden_class_matrix() -> None:
    expected = [
        [0.2, 0, 0.6, 0.2],
        [0.4, 0.2, 0.3, 0.1],
        [0.64, 0, 0.2, 0.16],
        [0.45714286, 0, 0.34285714, 0.2],
    ]
    assert close(class_matrix(torch.tensor([0.3, -0.1, 0.2, 0], dtype=torch.float64), 0.8), expected, 5e-9)


@pytest.mark.parametrize("classes", [3, 4, 10, 100])
@pytest.mark.parametrize("cc", [0.0, 0.3, 0.8, 1.0])
def test_class_matrix_equals_loops(classes: int, cc: float) -> None:
    v = randn(classes)
    assert close(class_matrix(v, cc), loop_matrix(v.tolist(), cc), 1e-14)


def is_target(matrix: Tensor, cc: float) -> bool:
    """Rows of probabilities with 1 - cc on the diagonal."""
    ones, diagonal = matrix.sum(-1), matrix.diagonal(dim1=-2, dim2=-1)
    good = close(ones, torch.ones_like(ones), 1e-14) and close(diagonal, torch.full_like(diagonal, 1 - cc), 0)
    return good and bool((matrix >= 0).all())


@pytest.mark.parametrize("classes", [3, 7, 10])
def test_class_matrix_properties(classes: int) -> None:
    for trial in range(20):
        v = randn(classes, name=f"trial {trial}")
        matrix, low = class_matrix(v, 0.8), int(v.argmin())
        assert is_target(matrix, 0.8)
        others = [k for k in range(classes) if k != low]
        assert matrix[others, low].tolist() == [0.0] * len(others)
        assert float(matrix[low, low]) == pytest.approx(0.2)
        assert close(class_matrix(1e-9 * v + 3e-9, 0.8), matrix, 1e-6)  # only proportions of v - min v matter
        assert close(class_matrix(1e-30 * v, 0.8), matrix, 1e-13)


@pytest.mark.parametrize(("classes", "cc"), [(2, 0.0), (3, 1 / 3), (10, 0.8), (100, 0.98)])
def test_default_mass_off_the_diagonal(classes: int, cc: float) -> None:
    assert close(class_matrix(randn(classes)).diagonal(), [1 - cc] * classes, 1e-15)
    assert close(s2o_matrix(randn(5, classes)).diagonal(), [1 - cc] * classes, 1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("v", [[1.0, 1, 1, 1], [0.0, 0, 0, 0], [-3e-8, -3e-8, -3e-8]])
def test_constant_vector_spreads_evenly(v: list[float], dtype: torch.dtype) -> None:
    others = len(v) - 1
    expected = [[0.2 if j == k else 0.8 / others for j in range(len(v))] for k in range(len(v))]
    assert close(class_matrix(torch.tensor(v, dtype=dtype), 0.8), expected, 1e-7)


def test_single_mass_spreads_its_own_row_evenly() -> None:
    matrix = class_matrix(torch.tensor([0, 0, 5.0, 0], dtype=torch.float64), 0.6)
    assert close(matrix[2], [0.2, 0.2, 0.4, 0.2])
    assert close(matrix[0], [0.4, 0, 0.6, 0])
    # A share of 1e-13 beside the single mass is nothing, one of 1e-11 is enough.
    beside = torch.tensor([[1e-13, 0, 1, 0], [1e-11, 0, 1, 0]], dtype=torch.float64)
    assert close(class_matrix(beside, 0.6)[:, 2], [[0.2, 0.2, 0.4, 0.2], [0.6, 0, 0.4, 0]])


@pytest.mark.parametrize("v", [[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]])
@pytest.mark.parametrize("cc", [0.0, 0.3, 0.8])
def test_two_classes_are_finite(v: list[float], cc: float) -> None:
    assert close(class_matrix(torch.tensor(v, dtype=torch.float64), cc), [[1 - cc, cc], [cc, 1 - cc]])


def test_many_matrices_at_once() -> None:
    v = randn(2, 3, 5)
    together = class_matrix(v, 0.7)
    assert together.shape == (2, 3, 5, 5)
    assert all(close(together[i, j], class_matrix(v[i, j], 0.7), 1e-15) for i in range(2) for j in range(3))


def test_matrices_are_constants() -> None:
    v, logits = randn(4).requires_grad_(), randn(3, 4).requires_grad_()
    assert not class_matrix(v).requires_grad
    assert not s2o_matrix(logits).requires_grad


# S2O


def test_golden_s2o_matrix() -> None:
    expected = [[0.2, 0.8, 0], [0.4, 0.2, 0.4], [0, 0.8, 0.2]]
    assert close(s2o_matrix(FEATURES @ W.T, 0.8), expected, 1e-14)


@pytest.mark.parametrize("classes", [3, 10])
def test_s2o_matrix_equals_loops(classes: int) -> None:
    z = randn(6, classes)
    matrix = s2o_matrix(z, 0.8)
    for k in range(classes):
        a = [abs(sum(float(row[k] * row[j]) for row in z)) for j in range(classes)]
        row = [0.0 if j == k else max(a) - a[j] for j in range(classes)]
        expected = [0.2 if j == k else 0.8 * value / sum(row) for j, value in enumerate(row)]
        assert close(matrix[k], expected, 1e-12)
    assert is_target(matrix, 0.8)


@pytest.mark.parametrize(
    "z",
    [
        [[0.0, 0, 0], [0, 0, 0]],  # a head that starts at zero
        [[1.0, 1, 1]],  # every entry of A alike
        [[1.0, -1, 1], [2, -2, 2]],
        [[1e-12, 2e-12, -1e-12]],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_degenerate_logits_are_finite(z: list[list[float]], dtype: torch.dtype) -> None:
    matrix = s2o_matrix(torch.tensor(z, dtype=dtype), 0.8).double()
    assert close(matrix.sum(1), [1, 1, 1], 1e-6)
    assert close(matrix.diagonal(), [0.2] * 3, 1e-7)
    assert bool((matrix >= 0).all())


@pytest.mark.parametrize("z", [[[1.0, 3.0]], [[3.0, -1.0]], [[0.1, 3.0], [2.0, -0.1]]])
def test_s2o_of_two_classes(z: list[list[float]]) -> None:
    assert close(s2o_matrix(torch.tensor(z, dtype=torch.float64), 0.8), [[0.2, 0.8], [0.8, 0.2]])


# The loss against soft labels


def loop_kl(target: list[float], z: list[float]) -> float:
    norm = math.log(sum(math.exp(v) for v in z))
    return sum(p * (math.log(p) - (v - norm)) for p, v in zip(target, z, strict=True) if p > 0)


def test_soft_kl_equals_loops() -> None:
    matrix, z, y = class_matrix(randn(5)), randn(7, 5, name="z"), torch.tensor([0, 4, 2, 2, 1, 3, 0])
    assert bool((matrix == 0).any())
    expected = [loop_kl(matrix[k].tolist(), row) for k, row in zip(y.tolist(), z.tolist(), strict=True)]
    assert float(soft_kl(matrix, y, z)) == pytest.approx(sum(expected) / 7, rel=1e-13)
    y[[1, 3]] = -1
    expected = [e for i, e in enumerate(expected) if i not in (1, 3)]
    assert float(soft_kl(matrix, y, z)) == pytest.approx(sum(expected) / 5, rel=1e-13)


def test_soft_kl_of_mixed_labels_mixes_the_rows() -> None:
    matrix, z = class_matrix(randn(4)), randn(3, 4, name="z")
    y = randn(3, 4, name="y").softmax(1)
    expected = [loop_kl((row @ matrix).tolist(), logits.tolist()) for row, logits in zip(y, z, strict=True)]
    assert float(soft_kl(matrix, y, z)) == pytest.approx(sum(expected) / 3, rel=1e-13)
    assert float(soft_kl(matrix.float(), y, z.float())) == pytest.approx(sum(expected) / 3, rel=1e-5)


def test_soft_kl_of_several_matrices() -> None:
    matrices, z, y = class_matrix(randn(3, 5)), randn(6, 5, name="z"), torch.tensor([0, 1, -1, 3, 4, 0])
    assert close(soft_kl(matrices, y, z), [float(soft_kl(m, y, z)) for m in matrices], 1e-14)
    mixed = randn(6, 5, name="y").softmax(1)
    assert close(soft_kl(matrices, mixed, z), [float(soft_kl(m, mixed, z)) for m in matrices], 1e-14)


def test_soft_kl_of_the_identity_is_cross_entropy() -> None:
    z, y = randn(6, 4), torch.tensor([0, 1, -1, 3, 2, 0])
    assert close(soft_kl(torch.eye(4).double(), y, z), F.cross_entropy(z, y, ignore_index=-1), 1e-14)


def test_soft_kl_is_zero_at_its_target_and_without_labels() -> None:
    matrix, y = class_matrix(randn(4), 0.5), torch.tensor([0, 1, 2, 3])
    z = matrix.clamp_min(1e-300).log().requires_grad_()
    assert abs(float(soft_kl(matrix, y, z).detach())) < 1e-14
    nothing = soft_kl(matrix, torch.full((4,), -1), z)
    assert float(nothing.detach()) == 0
    (gradient,) = torch.autograd.grad(nothing, z)
    assert bool((gradient == 0).all())


def test_soft_kl_gradient() -> None:
    """d/dz of mean KL(q || softmax(z)) is (softmax(z) - q)/n; unlabeled samples get none."""
    matrix, y = class_matrix(randn(5)), torch.tensor([0, -1, 3])
    z = randn(3, 5, name="z").requires_grad_()
    (gradient,) = torch.autograd.grad(soft_kl(matrix, y, z), z)
    expected = (z.softmax(1) - matrix[y.clamp_min(0)]).detach() / 2
    expected[1] = 0
    assert close(gradient, expected, 1e-15)


def test_confident_logits_stay_finite() -> None:
    z = torch.tensor([[1e4, -1e4, 0.0], [0.0, 500.0, -500.0]], requires_grad=True)
    matrix = s2o_matrix(z)
    loss = soft_kl(matrix, torch.tensor([0, 1]), z)
    (gradient,) = torch.autograd.grad(loss, z)
    assert bool(loss.isfinite())
    assert bool(gradient.isfinite().all())
