"""Recipes with a helper or with extra images: the constants of their sources."""

from __future__ import annotations

from flatrock.objectives.catalog import OBJECTIVES
from flatrock.recipes.load import load_recipe


def test_gat_and_hat_have_their_own_schedules() -> None:
    gat, hat = load_recipe("cifar10_gat_linf"), load_recipe("cifar10_hat_linf")
    assert (gat.train.batch_size, gat.train.epochs, gat.data.held_out) == (64, 100, 1000)
    assert (gat.optimizer.lr, gat.schedule.options["milestones"]) == (0.1, [70, 85])
    assert gat.objective.options == {"weight": 10, "rise": 4, "rise_after": 0.85}
    assert (gat.attack.name, gat.attack.bn_mode) == ("guided", "eval")
    assert (hat.train.epochs, hat.schedule.name, hat.optimizer.lr) == (50, "one_cycle", 0.21)
    for recipe, beta in ((hat, 2.5), (load_recipe("cifar10_hat_ddpm_linf"), 3.5)):
        options = recipe.objective.options
        assert (options["beta"], options["gamma"], options["reach"]) == (beta, 0.5, 2)
        assert options["helper"] == "runs/cifar10_standard"
        assert recipe.model.name == gat.model.name == "preact_resnet18"
    assert load_recipe("cifar10_standard").objective.name == "standard"


def test_robust_self_training_has_the_constants_of_its_code() -> None:
    recipe, awp = load_recipe("cifar10_rst_linf_wrn28"), load_recipe("cifar10_rst_awp_linf_wrn28")
    assert recipe.flatness == ()
    assert {**awp.training_keys(), "flatness": None} == {**recipe.training_keys(), "flatness": None}
    smooth = load_recipe("cifar10_rst_smooth_wrn28")
    assert (smooth.attack.name, smooth.attack.options, smooth.train.epochs) == ("gaussian", {"sigma": 0.25}, 800)
    assert (smooth.data, smooth.optimizer, smooth.objective) == (recipe.data, recipe.optimizer, recipe.objective)
    labeller = load_recipe("cifar10_standard_wrn28")
    assert (labeller.model.name, labeller.objective.name) == (recipe.model.name, "standard")
    assert labeller.data.extra is None


def test_training_on_generated_images_has_the_papers_settings() -> None:
    wide, helped = load_recipe("cifar10_trades_ddpm_linf_wrn28"), load_recipe("cifar10_hat_ddpm_linf")
    assert (wide.model.name, wide.model.options["activation"]) == ("wide_resnet28_10", "silu")
    for recipe in (wide, helped):
        assert recipe.data.extra is not None
        assert (recipe.train.batch_size, recipe.data.extra.fraction, recipe.train.epochs) == (1024, 0.7, 400)
        assert (recipe.optimizer.lr, recipe.objective.options["label_smoothing"]) == (0.4, 0.1)
        assert (recipe.attack.bn_mode, recipe.attack.options["start"]) == ("frozen", "uniform")
        options = {"decay": 0.995, "start": 0.025, "ramp": True}
        assert [(f.name, f.options) for f in recipe.flatness] == [("swa", options)]
        made = OBJECTIVES.make(recipe.objective.name, **recipe.objective.options)
        # Momentum 1 in the first step: as many batches count in full as it makes passes.
        assert (recipe.model.options["bn_momentum"], recipe.model.options["bn_first"]) == (0.01, len(made.passes))
