"""What is asked: recipes in YAML, their parts as strict models, and the plan that a recipe makes for one model."""

from weightprep.recipe.gate_check import gate_attributes, refuse_unsound
from weightprep.recipe.json_schema import recipe_schema
from weightprep.recipe.load import find_recipe, list_recipes, load_recipe, recipe_directories
from weightprep.recipe.plan import ModelPlan, ModulePlan
from weightprep.recipe.recipe import Recipe
from weightprep.recipe.resolve import NEXTN_GROUP, PrecisionChoice, resolve

__all__ = [
    "NEXTN_GROUP",
    "ModelPlan",
    "ModulePlan",
    "PrecisionChoice",
    "Recipe",
    "find_recipe",
    "gate_attributes",
    "list_recipes",
    "load_recipe",
    "recipe_directories",
    "recipe_schema",
    "refuse_unsound",
    "resolve",
]
