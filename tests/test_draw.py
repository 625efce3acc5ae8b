"""What a drawn round says is what the decoder did."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from tiny import prompts

from treegraft import cli
from treegraft.draw import DrawnRound, in_terminal, most_telling, svg, watch, why
from treegraft.runtime.decode import AUTOREGRESSIVE, Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.scheduler import Artifact, Mask, Rule, Rules, TreeModel
from treegraft.runtime.size import Cut

DRAFTING = Drafting(depth=3, width=3, children=3, budget=12)
RULES = Rules(
    (Rule(1, (("lag", "<=", 2.0),)), Rule(2, (("lag", ">", 2.0), ("root_match", ">", 0.0)))), ("lag", "root_match")
)
TREE = TreeModel(
    (0, 1, -1, -1, -1), (1.5, 0.0, 0, 0, 0), (1, 2, 0, 0, 0), (4, 3, 0, 0, 0), (0, 0, 0.25, -0.5, -0.125),
    ("step", "root_match"),
)  # fmt: skip
CUT = Cut("score", log_s=-3.0)
SCHEDULES = {"small": Mask(0), "mask": Mask(0b101), "rules": RULES, "tree": TREE}


def plan(schedule: Mask | Rules | TreeModel | Artifact, cut: Cut = CUT, **more: int) -> Plan:
    return Plan("mine", schedule, Drafting(**{**DRAFTING.as_dict(), **more}), cut)


def artifact(schedule: Mask | Rules | TreeModel) -> Artifact:
    return Artifact(schedule, DRAFTING.as_dict(), {"kind": "score", "log_s": -3.0}, 0, {})


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("shipped", [False, True])
def test_drawn_rounds_are_the_decoders_own(pair, name: str, shipped: bool) -> None:
    target, medium = pair("llama")
    mine = plan(artifact(SCHEDULES[name]) if shipped else SCHEDULES[name])
    prompt = prompts(4, seed=3)[3]
    decoded = decode(target, medium, prompt, mine, 16)
    drawn = watch(target, medium, mine, prompt, 16)
    assert [r.number for r in drawn] == list(range(1, len(decoded.rounds) + 1))
    for done, seen in zip(decoded.rounds, drawn):
        assert sum(1 << k for k, step in enumerate(seen.steps) if step.drafter == "medium") == done.mask
        assert [step.processed for step in seen.steps] == done.tokens
        assert (len(seen.tree) - 1, len(seen.kept), len(seen.accepted)) == (done.drafted, done.kept, done.accepted)
        proposers = [step.drafter for step in seen.steps for _ in step.attached]
        assert proposers == seen.tree.proposers[1:], "the steps share out all nodes, each to its own drafter"


def test_the_words_after_the_root_are_the_answers(pair) -> None:
    target, medium = pair("llama")
    prompt = prompts(4, seed=3)[3]
    answer = [f"t{token}" for token in decode(target, None, prompt, AUTOREGRESSIVE, 16).tokens]
    said: list[str] = []
    for drawn in watch(target, medium, plan(Mask(0b111), Cut("none")), prompt, 16):
        assert drawn.words[0] == answer[len(said)]
        said += [drawn.words[node] for node in (0, *drawn.accepted)]
        assert drawn.bonus == (answer[len(said)] if len(said) < len(answer) else None)
    assert said == answer[: len(said)] and len(said) >= 15


@pytest.mark.parametrize(
    "schedule, step, signals, reason",
    [
        (Mask(1), 1, {}, "fixed by the schedule"),
        (RULES, 1, {"lag": 2, "root_match": 1}, "rule: lag 2 <= 2"),
        (RULES, 1, {"lag": 3, "root_match": 1}, "no rule holds: lag 3, not <= 2"),
        (RULES, 2, {"lag": 3, "root_match": 1}, "rule: lag 3 > 2, root_match 1 > 0"),
        (RULES, 2, {"lag": 3, "root_match": 0}, "no rule holds: root_match 0, not > 0"),
        (RULES, 3, {"lag": 3, "root_match": 1}, "no rule for this step"),
        (Rules((Rule(1, ()),), ()), 1, {}, "rule: always"),
        (TREE, 1, {"step": 1, "root_match": 0}, "margin +0.250 tokens: step 1 <= 1.5, root_match 0 <= 0"),
        (TREE, 2, {"step": 2, "root_match": 0}, "margin -0.125 tokens: step 2 > 1.5"),
    ],
)
def test_the_reason_names_what_the_decision_read(schedule, step: int, signals: dict, reason: str) -> None:
    for given in (schedule, artifact(schedule)):
        assert why(plan(given), step, 0, signals) == reason


def test_a_spent_budget_of_calls_is_the_reason(pair) -> None:
    target, medium = pair("llama")
    for drawn in watch(target, medium, plan(Mask(0b111), medium_calls=1), prompts(2)[1], 8):
        assert [step.drafter for step in drawn.steps] == ["medium", "small", "small"]
        assert [step.why for step in drawn.steps[1:]] == ["no medium call left in this round"] * 2


def some_round(pair, schedule: Mask | Rules | TreeModel = RULES) -> DrawnRound:
    target, medium = pair("llama")
    return most_telling(watch(target, medium, plan(schedule), prompts(4, seed=3)[3], 16))


def test_the_most_telling_round_has_both_drafters_and_then_most_accepted(pair) -> None:
    target, medium = pair("llama")
    rounds = watch(target, medium, plan(Mask(0b110)), prompts(4, seed=3)[3], 24)
    both = [len(drawn.accepted) for drawn in rounds if {"small", "medium"} <= set(drawn.tree.proposers)]
    chosen = most_telling(rounds)
    assert both and {"small", "medium"} <= set(chosen.tree.proposers) and len(chosen.accepted) == max(both)


def test_the_picture_is_xml_with_a_group_a_node_and_faint_ones_where_not_verified(pair) -> None:
    drawn = some_round(pair, Mask(0b011))
    drawn.words[1] = "<|im_end|> & more"
    root = ElementTree.fromstring(svg(drawn))
    groups = root.findall("{http://www.w3.org/2000/svg}g")
    assert len(groups) == len(drawn.tree)
    faint = [i for i, group in enumerate(groups) if group.get("opacity") != "1"]
    assert faint == [i for i in range(1, len(drawn.tree)) if i not in drawn.kept] != []
    filled = [i for i, group in enumerate(groups) if group[1].get("fill-opacity") == "0.5"]
    assert filled == sorted([0, *drawn.accepted])
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<|im_end…" in texts and texts.count("fixed by the schedule") == 3


def test_the_terminal_shows_every_verified_node_and_counts_the_others(pair) -> None:
    drawn = some_round(pair)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(in_terminal(drawn))
    lines = captured.get().splitlines()
    assert sum(", step " in line and "drafted" not in line for line in lines) == len(drawn.kept)
    assert sum("✓" in line for line in lines) == len(drawn.accepted)
    dropped = sum(int(line.split("+")[1].split()[0]) for line in lines if "drafted, not verified" in line)
    around = {0, *drawn.kept}
    assert dropped == sum(drawn.tree.parent[n] in around and n not in around for n in range(len(drawn.tree)))
    for step in drawn.steps:
        assert any(line.endswith(step.why) or step.why + " " in line for line in lines)


def test_the_command_draws_the_round_asked_for(pair, tmp_path: Path, capsys) -> None:
    target, medium = pair("llama")
    words = ["draw", "--target", target.name, "--medium", medium.name, "--raw", "--prompt", "t1 t2 t3 t1 t2"]
    words += ["--depth", "3", "--max-new-tokens", "8"]
    out = tmp_path / "pictures" / "round.svg"

    def run(*more: str) -> None:
        cli.app([*words, *more], standalone_mode=False)

    run("--round", "2", "--out", str(out))
    said = capsys.readouterr().out
    assert said.startswith("round 2, after ... t1 t2 t3 t1 t2") and "drafted" in said
    ElementTree.fromstring(out.read_text())
    with pytest.raises(ValueError, match=r"--round 99: the answer took \d rounds"):
        run("--round", "99")
    with pytest.raises(ValueError, match="drafts no tree"):
        run("--schedule", "autoregressive")
