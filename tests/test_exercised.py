"""Every kind in every registry is part of some training, evaluation or opened data set of the quick set."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from small import different_models, quick_recipes

from vitrail.model.config import TrunkConfig
from vitrail.model.zoo import ZOO
from vitrail.recipes import recipe
from vitrail.registry import PARTS

TESTS = Path(__file__).parent
LANGUAGE = "run/test_language_model.py::test_a_recipe_trains_for_two_steps"
BRANCHES = "learn/test_one.py::test_it_is_built_from_a_configuration_trains_everything_and_compiles_whole"
DIFFUSION = "learn/test_diffusion.py::test_the_recipe_trains_watches_its_loss_and_is_loaded"
SOURCES = "data/test_sources.py::test_"
TEST_OF = {  # where no test goes over the registry
    "head": {"branches": BRANCHES, "next_token": LANGUAGE},
    "mixer": {
        "elu_kernel": "model/test_sima.py::test_the_elu_kernel_is_attention_with_its_similarity",
        "efficient": "model/test_sima.py::test_efficient_attention_has_rows_that_sum_to_one",
        "cosformer": "model/test_sima.py::test_cosformer_is_relu_attention_weighed_by_cosines_of_distances",
    },
    "objective": {
        "one": BRANCHES,
        "regression": "learn/test_regression.py::test_the_loss_is_of_standardised_values",
        "protonw": "learn/test_bank_shards.py::test_training_in_two_processes_is_training_in_one",
        "diffusion": DIFFUSION,
        "language_model": LANGUAGE,
    },
    "evaluator": {
        "denoising": DIFFUSION,
        "regression": "learn/test_regression.py::test_the_evaluator_gives_metrics_in_the_units_of_the_data",
        "cifar_c": "measure/test_cifar_c.py::test_errors_by_kind_and_severity_are_those_of_a_loop",
        "slices": "measure/test_slices.py::test_slices_are_terciles_of_what_brute_force_measures",
        "episodes": "measure/test_episodes.py::test_the_protocol_gives_numbers_and_a_table_that_can_be_stored",
        "perplexity": LANGUAGE,
        "bleu": LANGUAGE,
    },
    "source": {
        "folder": f"{SOURCES}an_undivided_tree_is_carved_and_labelled_by_folder",
        "table": f"{SOURCES}a_csv_gives_labels_splits_and_coarse_labels",
        "npz": f"{SOURCES}npz_images_are_those_of_the_arrays",
        "embedded": f"{SOURCES}embedded_images_carry_their_labels",
        "torchvision": f"{SOURCES}torchvision_sets_are_read_from_disk_and_never_fetched",
        "webdataset": "data/test_webdataset.py::test_a_tar_of_class_folders_is_the_folder",
        "stream": "data/test_stream.py::test_streamed_images_are_those_of_the_local_tars",
        "packed": "data/test_packed.py::test_training_batches_are_those_of_the_source",
        "hf": "data/test_parquet.py::test_a_name_of_the_hub_is_fetched_and_opened",
        "text": "data/test_text.py::test_a_table_has_its_own_columns_quotes_and_splits",
        "synthetic:shapes": "run/test_recipes.py::test_a_recipe_trains_for_two_steps",
        "synthetic:grammar": "data/test_text.py::test_a_recipe_trains_for_two_steps",
        "synthetic:meals": LANGUAGE,
        "synthetic:numbers": "run/test_seq2seq.py::test_it_learns_to_write_small_numbers",
    },
}


def exercised(family: str) -> set[str]:
    """Kinds that tests over models (a training step), recipes (two) and evaluators use."""
    recipes, rows = [recipe(name) for name in quick_recipes()], [ZOO[name] for name in different_models()]
    if family == "head":
        return {row.head.kind for row in rows} | {c.model.head.kind for c in recipes if c.model.head is not None}
    if family == "mixer":
        return {row.trunk.mixer.kind for row in rows if isinstance(row.trunk, TrunkConfig)}
    if family == "objective":
        return {config.objective.kind for config in recipes}
    if family == "evaluator":  # test_protocols.py goes over all but these
        return set(PARTS["evaluator"]) - TEST_OF["evaluator"].keys()
    return set()


@pytest.mark.parametrize("family", PARTS)
def test_every_kind_is_exercised(family: str) -> None:
    assert set(PARTS[family]) - exercised(family) == TEST_OF[family].keys()


@pytest.mark.parametrize("test", sorted({test for row in TEST_OF.values() for test in row.values()}))
def test_what_exercises_a_kind_is_a_quick_test(test: str) -> None:
    file, name = test.split("::")
    functions = {
        node.name: node
        for node in ast.parse((TESTS / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert not [
        line for line in map(ast.unparse, functions[name].decorator_list) if line.startswith("pytest.mark.slow")
    ]
