"""Further evaluations of a recipe: what they are called, what is refused, what they leave alone, what answers them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from recipe_table_cases import EXPECTED
from results_cases import fake_run
from start_cases import FEW

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.records import Result
from flatrock.core.rows import WORST, Row, read_rows, write_rows
from flatrock.core.runs import Run
from flatrock.engine.folder import RunFolder
from flatrock.recipes.further import measures_of, options_of, surrogates, where_of
from flatrock.recipes.load import load_recipe, recipe_names
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.restore import evaluated_recipe, stored_recipe
from flatrock.recipes.schema import Further, Recipe
from flatrock.workflows.compare import judged
from flatrock.workflows.evaluate import evaluate_run, store_result
from flatrock.workflows.results import collect_run, further_left, questions_left, take_attacks
from flatrock.workflows.train import train_recipe

RADII: list[dict[str, Any]] = [
    {"attacks": ["pgd-2", "fgsm"], "eps": "1/255"},
    {"attacks": ["fgsm"], "limit": 40, "first": True},
    {"attacks": ["rays:queries=20"], "limit": 30, "eps": 0.1},
]
MOVED = {"attacks": ["transfer-pgd-2"], "surrogate": "other"}


def asked(**keys: Any) -> Recipe:
    return load_recipe("digits_at", {"evaluate.more": [{"attacks": ["pgd-3"], **keys}]})


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({}, ""),
        ({"eps": 0.2}, ""),
        ({"norm": "linf", "eps": "1/5"}, ""),
        ({"eps": "4/255"}, "4/255"),
        ({"eps": 0.031}, "0.031"),
        ({"norm": "l2", "eps": 0.2}, "l2-0.2"),
        ({"norm": "l2", "eps": "128/255"}, "l2-128/255"),
        ({"limit": 1000, "first": True}, "first1000"),
        ({"limit": 50, "eps": 0.1}, "0.1-n50"),
    ],
)
def test_measures_are_called_by_what_is_asked(keys: dict[str, Any], where: str) -> None:
    recipe = asked(**keys)
    (one,) = recipe.evaluate.more
    assert where_of(one, recipe.threat) == where
    assert measures_of(one, recipe.threat) == [f"pgd-3@{where}" if where else "pgd-3"]


def test_a_plan_and_labels_have_their_own_names() -> None:
    recipe = asked(attacks=["autoattack", {"name": "pgd", "steps": 3, "label": "mine"}], eps=0.1)
    assert measures_of(recipe.evaluate.more[0], recipe.threat) == ["autoattack@0.1", "mine@0.1"]


def test_all_faults_are_told_at_once() -> None:
    more: list[Any] = [
        {"attacks": ["pdg-20"], "eps": 0.1},
        {"attacks": ["pgd-3"], "eps": 8},
        {"attacks": ["pgd-3"], "norm": "l2"},
        {"attacks": ["rays"], "norm": "l2", "eps": 0.5},
        {"attacks": ["transfer-pgd-20"]},
        {"attacks": ["pgd-3"], "surrogate": "runs/x"},
        {"attacks": ["pgd-4"], "first": True},
        {"attacks": ["pgd-20"]},
        {"attacks": ["pgd-5"], "eps": 0.1},
        {"attacks": ["pgd-5"], "eps": 0.1},
        {"attacks": []},
    ]
    with pytest.raises(ConfigError) as caught:
        load_recipe("digits_at", {"evaluate.more": more, "train.epochs": 0})
    told = [fault.partition(": ") for fault in caught.value.faults]
    assert [place for place, _, _ in told] == [
        "train.epochs",
        "evaluate.more.0.attacks",
        "evaluate.more.1",
        "evaluate.more.2",
        "evaluate.more.3.attacks",
        "evaluate.more.4.attacks",
        "evaluate.more.5.surrogate",
        "evaluate.more.6.first",
        "evaluate.more.7",
        "evaluate.more.9",
        "evaluate.more.10.attacks",
    ]
    texts = [text for _, _, text in told]
    assert "unknown attack or plan 'pdg'" in texts[1] and "eps must lie in [0, 1]" in texts[2]
    assert "the recipe's 0.2 is a radius in linf, give one in l2" in texts[3]
    assert "in a recipe evaluate.more with surrogate: RUN" in texts[5]
    assert "no attack is crafted on runs/x; name one, such as transfer-pgd-20" in texts[6]
    assert "pgd-20 is measured by evaluate.attacks; leave one out" in texts[8]
    assert "pgd-5@0.1 is measured by evaluate.more.8" in texts[9]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([{"atacks": ["pgd-3"]}], "evaluate.more.0.atacks: unknown key 'atacks'; known: attacks, eps, first, limit"),
        ([{"eps": 0.1}], "evaluate.more.0.attacks: this key is required"),
        ([{"attacks": ["pgd-3"], "limit": 0}], "evaluate.more.0.limit"),
        (["rays"], "evaluate.more.0: got 'rays', but a section holds keys; write evaluate.more.0: {attacks: ...}"),
        ("rays", "evaluate.more: got 'rays', but this is a list"),
    ],
)
def test_what_is_no_evaluation_is_told(more: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("digits_at", {"evaluate.more": more})
    assert said in str(caught.value)


def test_they_decide_neither_weights_nor_the_numbers_of_a_row() -> None:
    plain, more = load_recipe("digits_at"), load_recipe("digits_at", {"evaluate.more": RADII})
    assert recipe_hash(more) == recipe_hash(plain) and more.judged_keys() == plain.judged_keys()
    assert more.about == plain.about and plain.about.bands, "what is expected is still expected"
    assert Recipe.model_validate(yaml.safe_load(yaml.safe_dump(more.resolved()))) == more


def test_no_base_passes_them_on(tmp_path: Path) -> None:
    base, child = tmp_path / "base.yaml", tmp_path / "child.yaml"
    base.write_text(yaml.safe_dump({"base": "digits_at", "evaluate": {"attacks": ["pgd-2"], "more": RADII}}))
    child.write_text("base: base\nthreat: {eps: 0.1}\n")
    assert len(load_recipe(base).evaluate.more) == 3
    assert load_recipe(child).evaluate.more == () and load_recipe(child).evaluate.attacks == ("pgd-2",)
    assert load_recipe("cifar10_at_linf").evaluate.more and not load_recipe("cifar10_full_at").evaluate.more


@pytest.mark.parametrize(
    ("overrides", "stay"),
    [
        (["train.epochs=1", "seed=3"], True),
        (["threat.eps=8/255"], True),
        (["threat.eps=0.031"], False),
        (["threat.norm=l2", "threat.eps=0.5"], False),
        (["data.name=cifar100"], False),
        (["threat.eps=0.02", "evaluate.more=[{attacks: [pgd-5], eps: 0.01}]"], True),
    ],
)
def test_another_threat_or_other_data_leave_them_behind(overrides: list[str], stay: bool) -> None:
    assert bool(load_recipe("cifar10_trades_linf", overrides).evaluate.more) == stay


RAT = ["pgd-20:step_size=0.003@0.031", "cw-20:step_size=0.003@0.031"]
# Of RAT's tables: what it quotes from others, what is L2, and what is attacked from other networks alone.
NOT_AS_RAT = {"cifar10_mart_linf_wrn34", "cifar10_at_linf_wrn34_20", *EXPECTED["rat_table3"], *EXPECTED["rat_table4"]}


def test_the_library_asks_what_the_tables_print() -> None:
    found = {name: load_recipe(name) for name in recipe_names()}
    names = {n: [m for one in r.evaluate.more for m in measures_of(one, r.threat)] for n, r in found.items()}
    rat = {n for t in ("rat_table1", "rat_table2", "rat_table5", "rat_table8", "s2o_models") for n in EXPECTED[t]}
    rat |= {"cifar10_at_linf", "cifar10_gat_linf", "cifar10_hat_linf", "cifar10_hat_ddpm_linf", "cifar10_trades_linf"}
    rat |= {f"cifar10_trades_linf_{network}" for network in ("wrn34", "vgg16", "mobilenetv2")}
    assert {n for n, measures in names.items() if measures[:2] == RAT} == rat - NOT_AS_RAT
    assert names["cifar10_at_linf"] == [*RAT, "autoattack"]
    for name in ("cifar10_trades_linf", "cifar10_trades_rat2_linf_eta020"):
        assert names[name] == [*RAT, "rays@0.031"]
    for name in EXPECTED["rat_table4"]:
        assert names[name] == [f"transfer-{attack}" for attack in RAT]
        assert list(surrogates(found[name]).values()) == [Path(f"runs/{found[name].data.name}_at_linf")]
    assert names["cifar10_atent_l2"] == names["cifar10_at_l2_wrn28"] == ["pgd-10:step_size=0.125@0.5"]
    walks = [f"{a}-20:step_size=0.003@{n}/255" for n in (2, 4, 12) for a in ("pgd", "langevin")]
    assert names["cifar10_atent_linf_wrn34"] == walks
    others = {"cifar10_atent_l2", "cifar10_at_l2_wrn28", "cifar10_atent_linf_wrn34", *EXPECTED["rat_table4"]}
    assert {n for n, measures in names.items() if measures} == (rat - NOT_AS_RAT) | others


# Results


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of digits_at called `mine` and one of another seed called `other`, both as small as can be."""
    folder = tmp_path_factory.mktemp("further")
    keys = {**FEW, "data.limit": 512, "evaluate.attacks": ["pgd-2", "fgsm"], "train.keep.every": 1}
    more = [*RADII, {**MOVED, "surrogate": str(folder / "other")}]
    train_recipe("digits_at", folder=folder / "other", device="cpu", **keys, seed=1)
    train_recipe("digits_at", folder=folder / "mine", device="cpu", **keys, **{"evaluate.more": more})
    for options in ({}, *map(options_of, evaluated_recipe(folder / "mine").evaluate.more)):
        store_result(folder / "mine", evaluate_run(folder / "mine", **options, journal=True))
    return folder


@pytest.fixture
def mine(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "mine", tmp_path / "mine"))


def left(folder: Path) -> list[Further]:
    return further_left(RunFolder(folder).run(), "best", stored_recipe(RunFolder(folder)))


def stored(folder: Path, pattern: str) -> Path:
    (file,) = folder.glob(pattern)
    return file


def test_a_row_has_them_under_names_of_their_own(mine: Path, tmp_path: Path) -> None:
    row = collect_run(mine)
    score = row.scores["best"]
    assert [one.where for one in score.more] == ["1/255", "first40", "0.1-n30", ""]
    names = ["pgd-2@1/255", "fgsm@1/255", "fgsm@first40", "rays:queries=20@0.1-n30", "transfer-pgd-2"]
    assert set(score.verdicts) == {"clean", "pgd-2", "fgsm", *names}
    assert set(score.figures) == {*score.verdicts, "mean_distance rays:queries=20@0.1-n30"}
    sizes = {name: len(flags) for name, flags in score.verdicts.items() if len(flags) != score.n}
    assert sizes == {"fgsm@first40": 40, "rays:queries=20@0.1-n30": 30}
    near = Result.from_json(stored(mine, "result-best-linf-0.1-rays*.json").read_text())
    assert score.figures["mean_distance rays:queries=20@0.1-n30"] == near.mean_distance["rays:queries=20"]
    assert torch.equal(score.verdicts["fgsm@first40"], score.right["fgsm"][:40]), "numbers belong to samples"
    moved = score.more[3].provenance["surrogate"]
    assert (moved["recipe"], moved["seed"]) == ("digits_at", 1)
    own = Result.from_json((mine / "result-best.json").read_text())
    assert torch.equal(score.worst, own.worst) and set(score.accuracy) == {"clean", "pgd-2", "fgsm"}


def test_rows_come_back_with_them_and_old_ones_without(mine: Path, tmp_path: Path) -> None:
    file, old = tmp_path / "rows.json", collect_run(fake_run(tmp_path, "digits_mart", {"clean": 80, "pgd-20": 50}))
    row = collect_run(mine)
    write_rows(file, [row, old])
    back, plain = read_rows(file) or []
    assert json.dumps(back.to_dict(), sort_keys=True) == json.dumps(row.to_dict(), sort_keys=True)
    assert back.scores["best"].figures == row.scores["best"].figures
    kept = json.loads(file.read_text())["rows"][1]["scores"]["best"]
    assert not {"more", "where", "distances"} & set(kept) and plain.scores["best"].more == ()
    bad = json.loads(file.read_text())
    bad["rows"][0]["scores"]["best"]["more"][0]["accuracy"]["fgsm"] = 0.125
    file.write_text(json.dumps(bad))
    with pytest.raises(StateError, match="accuracies do not follow"):
        read_rows(file)


def test_the_usual_comparison_does_not_see_them(mine: Path, tmp_path: Path) -> None:
    row = replace(collect_run(mine), changes=())
    write_rows(tmp_path / "rows.json", [row])
    (model,) = judged(str(tmp_path / "rows.json"))
    assert set(model.right) == {"clean", "pgd-2", "fgsm", WORST}


def test_nothing_is_left_and_what_is_lost_is_asked_again(mine: Path) -> None:
    assert left(mine) == []
    recipe = stored_recipe(RunFolder(mine))
    stored(mine, "result-best-linf-0.00392157-*.json").unlink()
    run = RunFolder(mine).run()
    assert left(mine) == [recipe.evaluate.more[0]]
    assert questions_left(run, "best", recipe) == [options_of(recipe.evaluate.more[0])]
    (mine / "result-best.json").unlink()
    assert questions_left(run, "best", recipe)[0] == {}
    assert len(questions_left(run, "last", recipe)) == 5


@pytest.mark.parametrize(
    "about",
    [{"seed": 1}, {"votes": 3}, {"epoch": 77}, {"recipe_hash": "0" * 16}, {"surrogate": {"recipe": "digits_at"}}],
)
def test_a_result_of_something_else_answers_nothing(mine: Path, about: dict[str, Any]) -> None:
    file = stored(mine, "result-best-linf-0.00392157-*.json")
    result = Result.from_json(file.read_text())
    file.write_text(replace(result, provenance={**result.provenance, **about}).to_json())
    assert [one.eps for one in left(mine)] == [pytest.approx(1 / 255)]


def test_a_damaged_one_answers_nothing_and_others_still_do(mine: Path) -> None:
    stored(mine, "result-best-fgsm-first40-*.json").write_text("{")
    assert [one.first for one in left(mine)] == [True]
    assert [one.where for one in collect_run(mine).scores["best"].more] == ["1/255", "0.1-n30", ""]


def test_whoever_asked_the_same_has_answered(mine: Path) -> None:
    """By hand, with the options of the command."""
    stored(mine, "result-best-linf-0.00392157-*.json").unlink()
    store_result(mine, evaluate_run(mine, attacks=["fgsm", "pgd-2"], eps="1/255"))
    assert left(mine) == []
    store_result(mine, evaluate_run(mine, attacks=["fgsm"], limit=40))
    score = collect_run(mine).scores["best"]
    assert torch.equal(score.more[1].right["fgsm"], score.right["fgsm"][:40]), "a fair few are not the first ones"


def test_a_surrogate_that_was_trained_anew_is_asked_again(mine: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "other", tmp_path / "other")
    folder, recipe = RunFolder(mine), stored_recipe(RunFolder(mine))
    moved = recipe.evaluate.more[3].model_copy(update={"surrogate": str(tmp_path / "other")})
    now = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"more": (moved,)})})
    folder.write_recipe(yaml.safe_dump(now.resolved()))
    assert left(mine) == [], "the same run elsewhere"
    shutil.rmtree(tmp_path / "other")
    assert left(mine) == [], "it is not there any more, and nobody knows better"
    shutil.copytree(trained / "mine", tmp_path / "other")  # of another seed
    assert left(mine) == [moved]


def test_another_surrogate_than_the_librarys_is_a_change(tmp_path: Path) -> None:
    found = {"clean": 80, "pgd-20:step_size=0.003": 50}
    path = fake_run(tmp_path, "cifar10_trades_awp_linf", found, further=False)
    plain = collect_run(path)
    assert plain.changes == () and plain.comparable, "what was not asked yet is no change"
    at = {
        "recipe": "cifar10_at_linf",
        "recipe_hash": recipe_hash(load_recipe("cifar10_at_linf")),
        "epoch": 2,
        "seed": 0,
    }
    attacks = ("transfer-pgd-20:step_size=0.003", "transfer-cw-20:step_size=0.003")

    def row(**surrogate: Any) -> Row:
        base = Result.from_json((path / "result-best.json").read_text())
        flags = {"clean": base.flags["clean"], **dict.fromkeys(attacks, base.flags["clean"])}
        about = {**base.provenance, "whole_plan": False, "surrogate": {**at, "weights": "abc", **surrogate}}
        result = Result(threat={"norm": "linf", "eps": 0.031}, flags=flags, provenance=about)
        (path / "result-best-x.json").write_text(result.to_json())
        return collect_run(path)

    assert row().comparable and [one.where for one in row().scores["best"].more] == ["0.031"]
    seeded = recipe_hash(load_recipe("cifar10_at_linf", {"seed": 3}))
    assert row(seed=3, recipe_hash=seeded).comparable
    (told,) = row(recipe="cifar10_at_fast").changes
    assert told == "evaluate.more.surrogate: cifar10_at_fast (abc) instead of cifar10_at_linf"
    (told,) = row(recipe_hash="0" * 16).changes
    assert told == "evaluate.more.surrogate: cifar10_at_linf, changed (abc) instead of cifar10_at_linf"


def test_a_run_takes_what_a_recipe_asks_now(mine: Path) -> None:
    folder = RunFolder(mine)
    own = stored_recipe(folder)
    now = own.model_copy(update={"evaluate": own.evaluate.model_copy(update={"more": own.evaluate.more[:1]})})
    (mine / "result-best.part").mkdir()
    (mine / "result-best.part" / "chunk-000000.safetensors").write_text("")
    take_attacks(folder, now)
    assert stored_recipe(folder).evaluate.more == own.evaluate.more[:1], "batches of the same attacks do not matter"


def test_a_checkpoint_that_was_kept_is_asked_too(mine: Path) -> None:
    result = evaluate_run(mine / "epoch-0001.safetensors", **options_of(evaluated_recipe(mine).evaluate.more[1]))
    assert store_result(mine / "epoch-0001.safetensors", result).name.startswith("result-epoch-0001-fgsm-first40")


def test_runs_without_any_are_as_before(tmp_path: Path) -> None:
    row = collect_run(fake_run(tmp_path, "digits_at", {"clean": 80, "pgd-20": 50}))
    score = row.scores["best"]
    assert score.more == () and score.figures == {"clean": 80.0, "pgd-20": 50.0}
    assert isinstance(RunFolder(tmp_path / "digits_at").run(), Run)
