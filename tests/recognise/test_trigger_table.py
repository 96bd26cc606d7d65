"""Small graphs on which other tools were seen to fail, by number: which tests hold each of them.

A row names its tests as ``folder/module::test``; what is tried by every form on every spec of a
table is in ``forms/test_triggers_of_forms``, by the same numbers.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FORMS = "forms/test_triggers_of_forms::test_right_or_refused"
HERE = "recognise/test_triggers::test_"
KINDS = "recognise/test_kinds::test_"
NEAR = "recognise/test_near_misses::test_near_miss"

TRIGGERS: Mapping[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "a prefix or bidirectional mask over a cache does not become causal",
        (HERE + "a_prefix_mask_over_a_cache_is_not_causal", FORMS),
    ),
    2: (
        "a window survives a long past",
        (HERE + "a_sliding_window_survives_a_long_past", FORMS),
    ),
    3: ("an unusual scale survives every form", (HERE + "an_unusual_scale_is_stated", FORMS)),
    4: (
        "a padding mask with holes is no end index",
        (HERE + "a_padding_mask_with_holes_is_no_end_index", FORMS),
    ),
    5: (
        "top-left and bottom-right differ",
        (
            HERE + "causal_alignment_is_told_apart",
            "forms/test_triggers_of_forms::test_5_the_two_alignments_differ_on_one_query",
        ),
    ),
    6: (
        "rows without keys have a policy, and poison in masked values stays out",
        (
            HERE + "a_row_without_keys_has_a_policy",
            HERE + "a_value_for_rows_without_keys_is_their_policy",
            "forms/test_triggers_of_forms::"
            "test_6_poison_in_masked_values_does_not_reach_the_output",
        ),
    ),
    7: ("the cap comes before the mask", (HERE + "the_cap_comes_before_the_mask", NEAR, FORMS)),
    8: (
        "shared heads interleave, they are not tiled",
        (NEAR, KINDS + "heads_told_over_again_by_an_einsum", FORMS),
    ),
    9: (
        "a past without a present, a mask shorter than the keys",
        (HERE + "a_past_without_a_present", FORMS),
    ),
    10: (
        "grouped heads with positions, bias or sinks",
        (HERE + "bias_and_sinks_on_grouped_heads", FORMS),
    ),
    11: ("odd head widths", (HERE + "odd_head_widths", FORMS)),
    12: (
        "half precision over many keys, and its overflow",
        (
            "forms/test_triggers_of_forms::test_12_overflow_of_half_precision_is_seen",
            "forms/test_triggers_of_forms::test_12_many_keys_in_half_precision",
        ),
    ),
    13: (
        "guards against NaN and casts around softmax",
        ("recognise/test_spellings::test_spelling",),
    ),
    14: (
        "softmax without an axis, and that of old opsets",
        (HERE + "softmax_of_old_opsets_over_flattened_scores", NEAR),
    ),
    15: (
        "probabilities that are also an output",
        (
            "recognise/test_spellings::test_weights_that_leave_the_graph_are_an_output_of_the_site",
            KINDS + "weights_that_leave_by_way_of_a_reshape",
            "rewrite/test_rewrite::test_scores_that_are_an_output_are_proven_too",
        ),
    ),
    16: ("a reshape that looks like a head split", (NEAR,)),
    17: (
        "grouped attention of equal heads, a head width that is a symbol, batch merged into heads",
        (
            HERE + "a_head_width_that_is_no_number_is_named",
            KINDS + "heads_merged_into_the_batch_of_rows_that_lie_one_after_another",
            FORMS,
        ),
    ),
    18: (
        "weights shared by two values, keys read by two layers",
        (
            HERE + "weights_shared_by_two_values_are_recognised_once",
            HERE + "keys_read_by_two_layers_are_shared",
        ),
    ),
    19: (
        "external data, over 2 GB, weights read inside bodies, functions",
        (
            HERE + "weights_of_over_2_gb_are_left_on_disk",
            "frontends/test_onnx_file::test_external_data_stays_on_disk_and_gives_the_same_digest",
            "recognise/test_control_flow::test_an_attention_inside",
            "rewrite/test_rewrite::test_a_site_inside_a_branch_is_rewritten_there",
        ),
    ),
    20: ("fused and slower", ("jobs/test_tune::test_a_plan_is_valid_and_names_the_fastest",)),
}


def defined_in(module: str) -> set[str]:
    tree = ast.parse((TESTS / f"{module}.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("number", TRIGGERS)
def test_the_tests_of_a_trigger_exist(number: int) -> None:
    for test in TRIGGERS[number][1]:
        module, name = test.split("::")
        assert name in defined_in(module), test


def test_every_trigger_has_a_row() -> None:
    assert sorted(TRIGGERS) == list(range(1, 21))
