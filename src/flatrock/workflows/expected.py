"""What is expected of rows: the bands of their recipes, as far as they are what these say."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from flatrock.core.bands import Bands
from flatrock.core.rows import Row
from flatrock.recipes.load import library, load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.schema import Recipe


def expected_bands(rows: Iterable[Row], recipes: Iterable[Recipe] = ()) -> dict[Hashable, Bands]:
    """The bands of rows that have some, by the key of the row.

    A row that failed, was changed, or was made when the recipe of its name was another is compared with nothing, nor
    are plain weights with what is expected of averaged ones. The recipes of the library are known; those of files are
    if they are among `recipes`.
    """
    given: dict[tuple[str, str], Bands] = {(recipe.name, recipe_hash(recipe)): recipe.about.bands for recipe in recipes}
    found: dict[Hashable, Bands] = {}
    for row in rows:
        if not row.judged or row.stands_in:
            continue
        if bands := given.get((row.recipe, row.recipe_hash)) if row.own else _known(row):
            found[row.key] = bands
    return found


def _known(row: Row) -> Bands | None:
    """The bands of the library's recipe, if the row is of that one."""
    if row.recipe not in library():
        return None
    recipe = load_recipe(row.recipe, {"seed": row.seed})
    return recipe.about.bands if recipe_hash(recipe) == row.recipe_hash else None
