"""Whole updates against backpropagation, projected ascent, SGD and AdamW written out in numpy, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatrock.attacks.langevin import Langevin
from flatrock.core.rng import Seed
from flatrock.data.augment import mixup
from flatrock.data.loader import Batch
from flatrock.engine.craft import craft
from flatrock.engine.job import Job
from flatrock.engine.loss import Stage, decayed, objective_gradients
from flatrock.engine.step import train_step
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe

Array = np.ndarray[Any, np.dtype[np.float64]]
Weights = dict[str, Array]
LAYERS = ("fc1", "fc2", "head")
SMALL = Path(__file__).with_name("small.yaml")
EPS, STEP_SIZE, K, BETA = 0.05, 0.02, 3, 6.0


def forward(w: Weights, x: Array) -> tuple[Array, list[Array]]:
    """Logits of the three-layer network and the input of every layer."""
    inputs = [x]
    for name in LAYERS[:2]:
        inputs.append(np.maximum(inputs[-1] @ w[f"{name}.weight"].T + w[f"{name}.bias"], 0))
    return inputs[-1] @ w["head.weight"].T + w["head.bias"], inputs


def backward(w: Weights, inputs: list[Array], g: Array) -> tuple[Weights, Array]:
    """Gradients of the weights and of x, given the gradient g of the logits."""
    grads: Weights = {}
    for name, a in zip(LAYERS[::-1], inputs[::-1], strict=True):
        grads[f"{name}.weight"], grads[f"{name}.bias"] = g.T @ a, g.sum(0)
        g = g @ w[f"{name}.weight"]
        g = g * (a > 0) if name != "fc1" else g
    return grads, g


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def ascend(w: Weights, x: Array, start: Array, slope: Callable[[Array], Array]) -> Array:
    """K sign steps inside ball and box; `slope` is the gradient of the per-sample loss w.r.t. the logits."""
    x_adv = start
    for _ in range(K):
        z, inputs = forward(w, x_adv)
        _, g = backward(w, inputs, slope(z))
        x_adv = np.clip(x + np.clip(x_adv + STEP_SIZE * np.sign(g) - x, -EPS, EPS), 0, 1)
    return x_adv


def at_gradient(w: Weights, x: Array, y: Array, random: Callable[[str], Array]) -> Weights:
    hot = np.eye(2)[y]
    start = np.clip(x + (2 * random("uniform") - 1) * EPS, 0, 1)
    x_adv = ascend(w, x, start, lambda z: softmax(z) - hot)
    z, inputs = forward(w, x_adv)
    return backward(w, inputs, (softmax(z) - hot) / len(x))[0]


def trades_gradient(w: Weights, x: Array, y: Array, random: Callable[[str], Array]) -> Weights:
    """d KL/dz = s (log s/t - KL) and d KL/dz' = t - s; nothing is detached."""
    z, inputs = forward(w, x)
    s = softmax(z)
    start = np.clip(x + np.clip(1e-3 * random("normal"), -EPS, EPS), 0, 1)
    x_adv = ascend(w, x, start, lambda z_adv: softmax(z_adv) - s)
    z_adv, inputs_adv = forward(w, x_adv)
    t = softmax(z_adv)
    ratio = np.log(s) - np.log(t)
    kl = (s * ratio).sum(1, keepdims=True)
    clean, _ = backward(w, inputs, ((s - np.eye(2)[y]) + BETA * s * (ratio - kl)) / len(x))
    adv, _ = backward(w, inputs_adv, BETA * (t - s) / len(x))
    return {k: clean[k] + adv[k] for k in clean}


GRADIENTS = {"at": at_gradient, "trades": trades_gradient}


class ReferenceSGD:
    """g += decay*w; v = g at first, then momentum*v + g; w -= lr*(g + momentum*v if nesterov else v)."""

    def __init__(self, *, lr: float, momentum: float, weight_decay: float, nesterov: bool, decay_on: str) -> None:
        self.lr, self.momentum, self.decay, self.nesterov, self.on = lr, momentum, weight_decay, nesterov, decay_on
        self.v: Weights = {}

    def step(self, w: Weights, grads: Weights) -> Weights:
        new = {}
        for k, gradient in grads.items():
            decay = self.decay if self.on == "all" or k.endswith("weight") else 0.0
            g = gradient + decay * w[k]
            self.v[k] = self.momentum * self.v[k] + g if k in self.v else g
            new[k] = w[k] - self.lr * (g + self.momentum * self.v[k] if self.nesterov else self.v[k])
        return new


class ReferenceAdamW:
    """m = b1*m + (1 - b1)*g, v = b2*v + (1 - b2)*g^2, both over 1 - b^t; w -= lr*(decay*w + m/(sqrt(v) + eps))."""

    def __init__(self, *, lr: float, betas: list[float], eps: float, weight_decay: float, decay_on: str) -> None:
        self.lr, self.betas, self.eps, self.decay, self.on = lr, betas, eps, weight_decay, decay_on
        self.t, self.m, self.v = 0, Weights(), Weights()

    def step(self, w: Weights, grads: Weights) -> Weights:
        self.t, (b1, b2), new = self.t + 1, self.betas, {}
        for k, g in grads.items():
            self.m[k] = b1 * self.m.get(k, 0.0) + (1 - b1) * g
            self.v[k] = b2 * self.v.get(k, 0.0) + (1 - b2) * g * g
            decay = self.decay if self.on == "all" or k.endswith("weight") else 0.0
            ahead = (self.m[k] / (1 - b1**self.t)) / (np.sqrt(self.v[k] / (1 - b2**self.t)) + self.eps)
            new[k] = w[k] - self.lr * (decay * w[k] + ahead)
        return new


def moons_job(folder: Path, objective: str, **optimizer: Any) -> Job:
    """Two moons on the dense network, in double precision."""
    changes = {
        "data": {"name": "moons", "held_out": 20, "points": 100},
        "model": {"name": "moons_mlp"},
        "threat.eps": EPS,
        "objective.name": objective,
        "attack": {"steps": K, "step_size": STEP_SIZE},
        "optimizer": {"lr": 0.3, **optimizer},
        "train": {"epochs": 1, "batch_size": 25},
    }
    job = build_job(load_recipe(SMALL, changes), folder=folder)
    job.model.double()
    return job


def batches(job: Job) -> list[Batch]:
    return [Batch(b.x.double(), b.y, b.ids) for b in job.loader.epoch(0)][:3]


def weights(job: Job) -> Weights:
    return {k: p.detach().numpy().copy() for k, p in job.model.named_parameters()}


@pytest.mark.parametrize("objective", ["at", "trades"])
@pytest.mark.parametrize(
    "optimizer",
    [
        {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": False, "decay_on": "all"},
        {"momentum": 0.9, "weight_decay": 0.05, "nesterov": False, "decay_on": "weights"},
        {"momentum": 0.8, "weight_decay": 0.05, "nesterov": True, "decay_on": "all"},
        {"momentum": 0.8, "weight_decay": 0.05, "nesterov": True, "decay_on": "weights"},
        {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False, "decay_on": "all"},
        {"name": "adamw", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 5e-4, "decay_on": "all"},
        {"name": "adamw", "betas": [0.5, 0.9], "eps": 1e-4, "weight_decay": 0.5, "decay_on": "weights"},
    ],
    ids=["usual", "weights", "nesterov", "nesterov-weights", "plain", "adamw", "adamw-weights"],
)
def test_three_updates(tmp_path: Path, objective: str, optimizer: dict[str, Any]) -> None:
    name = optimizer.get("name", "sgd")
    lr = {"sgd": 0.3, "adamw": 0.02}[name]
    job = moons_job(tmp_path, objective, **optimizer, lr=lr)
    job.model.train()
    kind = {"sgd": ReferenceSGD, "adamw": ReferenceAdamW}[name]
    expected, reference = weights(job), kind(lr=lr, **{k: v for k, v in optimizer.items() if k != "name"})
    before = expected
    for step, batch in enumerate(batches(job)):
        gen = job.seed.child("attack", step).samples(batch.ids).child("restart", 0)
        draw = {"uniform": gen.uniform(batch.x).numpy(), "normal": gen.normal(batch.x).numpy()}
        grads = GRADIENTS[objective](expected, batch.x.numpy(), batch.y.numpy(), draw.__getitem__)
        expected = reference.step(expected, grads)
        train_step(job, batch, step=step, guard=True)
        for name, got in weights(job).items():
            np.testing.assert_allclose(got, expected[name], rtol=0, atol=1e-10, err_msg=f"{name} after step {step}")
    assert all(np.abs(expected[k] - before[k]).max() > 1e-4 for k in expected), "the updates must be worth comparing"


def test_penalties_are_the_formulas(tmp_path: Path) -> None:
    """l1 * sum|w| and l2/2 * sum w^2 over weights that are not biases: value and gradient."""
    l1, l2 = 3e-3, 0.07
    plain = {"momentum": 0.0, "weight_decay": 0.0}
    job, bare = moons_job(tmp_path, "at", **plain, l1=l1, l2=l2), moons_job(tmp_path, "at", **plain)
    batch = batches(job)[0]
    w = weights(job)
    matrices = [k for k in w if k.endswith("weight")]
    got = {k: v.item() for k, v in train_step(job, batch, step=0, guard=True).losses.items()}
    alone = train_step(bare, batch, step=0, guard=True).losses
    assert got["l1"] == pytest.approx(sum(np.abs(w[k]).sum() for k in matrices), rel=1e-12)
    assert got["l2"] == pytest.approx(sum((w[k] ** 2).sum() for k in matrices) / 2, rel=1e-12)
    assert set(alone) == {"total", "ce_adv"}
    assert got["total"] == pytest.approx(got["ce_adv"] + l1 * got["l1"] + l2 * got["l2"], rel=1e-12)
    for name, got in weights(job).items():
        extra = l1 * np.sign(w[name]) + l2 * w[name] if name in matrices else 0.0
        np.testing.assert_allclose(got, weights(bare)[name] - 0.3 * extra, rtol=0, atol=1e-12, err_msg=name)


def test_l2_penalty_equals_decay_on_weights(tmp_path: Path) -> None:
    penalty = moons_job(tmp_path, "trades", l2=0.04, weight_decay=0.0)
    decay = moons_job(tmp_path, "trades", weight_decay=0.04, decay_on="weights")
    for step, batch in enumerate(batches(penalty)):
        for job in (penalty, decay):
            train_step(job, batch, step=step, guard=True)
    for name, got in weights(penalty).items():
        np.testing.assert_allclose(got, weights(decay)[name], rtol=0, atol=1e-12, err_msg=name)


def test_decay_on_weights_spares_biases_and_batchnorm(make_job: Callable[..., Job], tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", optimizer__decay_on="weights", optimizer__weight_decay=0.02)
    on, off = job.optimizer.param_groups
    assert (on["weight_decay"], off["weight_decay"]) == (0.02, 0.0)
    names = {id(p): n for n, p in job.model.named_parameters()}
    assert {names[id(p)] for p in on["params"]} == {"conv1.weight", "conv2.weight", "conv3.weight", "head.weight"}
    assert len(on["params"]) + len(off["params"]) == len(names)
    assert [names[id(p)] for p in decayed(job.model)] == [names[id(p)] for p in on["params"]]


def test_mixup_trains_on_the_mixed_batch(tmp_path: Path) -> None:
    """One lambda and one partner for all: the update is that of the mixed inputs and soft labels, attack included."""
    job = moons_job(tmp_path, "at", momentum=0.0, weight_decay=0.0)
    object.__setattr__(job, "mixup_alpha", 1.4)
    job.model.train()
    batch, w = batches(job)[0], weights(job)
    hot = torch.nn.functional.one_hot(batch.y, 2).double()
    x, y = (t.numpy() for t in mixup(batch.x, hot, job.seed.child("mixup", 7), alpha=1.4))
    gen = job.seed.child("attack", 7).samples(batch.ids).child("restart", 0)
    start = np.clip(x + (2 * gen.uniform(batch.x).numpy() - 1) * EPS, 0, 1)
    x_adv = ascend(w, x, start, lambda z: softmax(z) - y)
    z, inputs = forward(w, x_adv)
    grads, _ = backward(w, inputs, (softmax(z) - y) / len(x))
    outcome = train_step(job, batch, step=7, guard=True)
    for name, got in weights(job).items():
        # Labels are mixed in single precision.
        np.testing.assert_allclose(got, w[name] - 0.3 * grads[name], rtol=0, atol=1e-7, err_msg=name)
    assert int(outcome.right) == int((z.argmax(1) == y.argmax(1)).sum())


@pytest.mark.parametrize("alpha", [0.9, 0.4])
def test_atent_descends_on_the_moving_average_over_its_walk(tmp_path: Path, alpha: float) -> None:
    """loss <- (1 - alpha) loss + alpha CE(x'_k) after every step k, the x'_k constants; AWP climbs the same loss."""
    job = moons_job(tmp_path, "at", momentum=0.0, weight_decay=0.0)
    walk = Langevin(steps=K, step_size=STEP_SIZE, noise=0.1, project="last", average=alpha)
    object.__setattr__(job, "attack", walk)
    job.model.train()
    batch, w = batches(job)[0], weights(job)
    x, hot = batch.x.numpy(), np.eye(2)[batch.y.numpy()]
    gen = job.seed.child("attack", 7).samples(batch.ids)
    x_adv = np.clip(x + EPS * np.sign(gen.child("start").normal(batch.x).numpy()), 0, 1)
    loss, grads = 0.0, {name: np.zeros_like(value) for name, value in w.items()}
    for k in range(1, K + 1):
        z, inputs = forward(w, x_adv)
        _, g = backward(w, inputs, softmax(z) - hot)
        noise = 0.1 * np.sqrt(2 * STEP_SIZE) * gen.child("noise", k).normal(batch.x).numpy()
        x_adv = x_adv + STEP_SIZE * np.sign(g) + noise
        x_adv = np.clip(x + np.clip(x_adv - x, -EPS, EPS) if k == K else x_adv, 0, 1)
        z, inputs = forward(w, x_adv)
        new, _ = backward(w, inputs, (softmax(z) - hot) / len(x))
        loss = (1 - alpha) * loss - alpha * np.log(softmax(z)[hot > 0]).mean()
        grads = {name: (1 - alpha) * grads[name] + alpha * new[name] for name in w}
    stage = Stage(job, batch.x, batch.y, batch.ids, job.moment(7))
    for name, got in objective_gradients(stage, {}, craft(stage, {})).items():
        np.testing.assert_allclose(got.numpy(), grads[name], rtol=0, atol=1e-12, err_msg=name)
    outcome = train_step(job, batch, step=7, guard=True)
    assert float(outcome.losses["total"]) == pytest.approx(loss, abs=1e-12)
    for name, value in weights(job).items():
        np.testing.assert_allclose(value, w[name] - 0.3 * grads[name], rtol=0, atol=1e-12, err_msg=name)


def test_attack_numbers_belong_to_seed_step_and_sample(tmp_path: Path) -> None:
    job = moons_job(tmp_path, "at")
    batch = batches(job)[0]
    seen = []

    class Spy:
        bounded = True

        def __call__(self, model: object, x: torch.Tensor, y: object, threat: object, gen: Any, **_: Any) -> Any:
            seen.append(gen.uniform(x))
            return x

    object.__setattr__(job, "attack", Spy())
    for step, chosen in ((0, batch), (1, batch), (0, Batch(batch.x.flip(0), batch.y.flip(0), batch.ids.flip(0)))):
        train_step(job, chosen, step=step, guard=True)
    object.__setattr__(job, "seed", Seed(99))
    train_step(job, batch, step=0, guard=True)
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2].flip(0))
    assert not torch.equal(seen[0], seen[3])
