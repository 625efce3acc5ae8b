"""The demo's JSON has the same keys whatever comes out of it."""

import pytest

from treegraft import bench
from treegraft.demo import fixed_schedules, for_readers, summarise


@pytest.mark.parametrize("best", [0b000, 0b010, 0b111])
def test_the_best_mask_is_named_in_a_field_and_has_figures_under_one_key(best: int) -> None:
    schedules = ["autoregressive", "generate", *fixed_schedules(best, 3).values(), "treegraft"]
    assert len(set(schedules)) == len(schedules)
    parts = dict.fromkeys(bench.PARTS, 0.0)
    records = [
        bench.Record("f", str(prompt), name, 10, 1.0 + place, 0, 0, 0, 1.0, 0, 0, 0, parts, [])
        for prompt in range(2)
        for place, name in enumerate(schedules)
    ]
    summary = summarise(records, best, 3)
    names = {"autoregressive", "small", "medium", "best mask", "treegraft"}
    assert summary["best_mask"] == f"0b{best:03b}" and set(summary["overall"]) == names
    assert set(summary["by_file"]["f"]) == names
    own = fixed_schedules(best, 3)[best]
    assert summary["overall"]["best mask"]["speedup"] == summary["overall"][own]["speedup"]
    assert set(for_readers(summary)) == names - {"best mask"} | {f"best mask 0b{best:03b}"}
