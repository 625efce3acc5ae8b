import subprocess
import sys

import pytest

from treegraft.runtime.drafting import Drafting
from treegraft.runtime.plan import make_cut, make_plan
from treegraft.runtime.scheduler import (
    Mask,
    Rule,
    Rules,
    ScheduleError,
    TreeModel,
    parse_mask,
)
from treegraft.runtime.size import Cut

RULES = Rules(
    (Rule(1, (("lag", "<=", 4.0),)), Rule(2, (("lag", ">", 4.0), ("match_mean", "<=", 1.5)))), ("lag", "match_mean")
)
TREE = TreeModel((0, -1, -1), (2.5, 0.0, 0.0), (1, 0, 0), (2, 0, 0), (0.0, 0.25, -0.5), ("tree_size",))


def test_small_medium_and_masks_are_schedules_with_bit_0_as_step_1() -> None:
    assert [parse_mask("0b00101", 5).decide(k, 0, {}) for k in range(1, 6)] == [True, False, True, False, False]
    assert parse_mask("small", 5) == Mask(0) and parse_mask("medium", 5) == Mask(31) and parse_mask("5", 5) == Mask(5)
    with pytest.raises(ScheduleError, match="K = 3"):
        parse_mask("0b1000", 3)
    with pytest.raises(ScheduleError, match="'wrong'"):
        make_plan("wrong", Drafting(), Cut("none"))


def test_rules_call_where_all_conditions_of_any_rule_of_the_step_hold() -> None:
    assert RULES.decide(1, 0, {"lag": 4.0, "match_mean": 9.0})
    assert not RULES.decide(1, 0, {"lag": 4.1, "match_mean": 9.0})
    assert RULES.decide(2, 0, {"lag": 5.0, "match_mean": 1.5})
    assert not RULES.decide(2, 0, {"lag": 5.0, "match_mean": 1.6})
    assert not RULES.decide(3, 0, {"lag": 0.0, "match_mean": 0.0})


def test_a_tree_calls_where_its_margin_is_positive() -> None:
    assert TREE.margin({"tree_size": 2.5}) == 0.25 and TREE.decide(1, 0, {"tree_size": 2})
    assert TREE.margin({"tree_size": 3}) == -0.5 and not TREE.decide(1, 0, {"tree_size": 3})


def test_a_schedule_says_at_which_steps_it_may_have_to_work_out_a_signal() -> None:
    def asking(schedule: Mask | Rules | TreeModel) -> list[int]:
        return [step for step in range(1, 6) if schedule.asks(step)]

    given = Rule(3, (("step", ">", 0.5), ("mask", "<=", 1.0), ("lag", "<=", 9.0)))
    assert asking(Mask(0b101)) == [] and asking(Rules((given,), ("step", "mask", "lag"))) == []
    assert asking(Rules((given, Rule(4, (*given.conditions, ("root_match", ">", 1.0)))), ("root_match",))) == [4]
    # Step 1 meets a leaf, step 2 the lag alone, steps 3 to 5 a signal on one side of the mask.
    tree = TreeModel(
        (0, -1, 0, 1, -1, -1, 2, -1, 3, -1, -1), (1.5, 0, 2.5, 4.5, 0, 0, 0.5, 0, 1.0, 0, 0),
        (1, 0, 3, 4, 0, 0, 7, 0, 9, 0, 0), (2, 0, 6, 5, 0, 0, 8, 0, 10, 0, 0),
        (0, 0.25, 0, 0, 1.0, -1.0, 0, -0.5, 0, 0.5, -0.5), ("step", "lag", "mask", "tree_size"),
    )  # fmt: skip
    assert asking(tree) == [3, 4, 5] and asking(TREE) == [1, 2, 3, 4, 5]


def test_a_cut_is_worth_none_or_a_number() -> None:
    assert make_cut("none", None, None) == Cut("none") and make_cut("-2.5", None, None) == Cut("score", log_s=-2.5)
    for bad, complaint in (("worth", "--latency"), ("best", "'best'")):
        with pytest.raises(ScheduleError, match=complaint):
            make_cut(bad, None, None)


def test_the_scheduler_imports_neither_torch_nor_another_stage() -> None:
    code = (
        "import sys, treegraft.runtime.scheduler; "
        "heavy = {'torch', 'transformers', 'sklearn', 'lightgbm', 'pyarrow', 'numpy'} & set(sys.modules); "
        "others = ('treegraft.collect', 'treegraft.value', 'treegraft.distill'); "
        "stages = [m for m in sys.modules if m.startswith(others)]; "
        "sys.exit(str(heavy or stages) if heavy or stages else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
