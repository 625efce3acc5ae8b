"""Draw one round of the default models as docs/tree.svg, the README's picture: `python tools/draw_round.py`."""

from pathlib import Path

from treegraft.demo import draw_round
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import load_model
from treegraft.runtime.plan import make_cut, make_plan

PROMPT = "Write a two-line poem about a tree, then write the same poem again."


def main() -> None:
    target, medium = load_model("default"), load_model("default-medium")
    plan = make_plan("0b00110", Drafting(width=3, children=3, budget=16), make_cut("-2.5", None, None))
    chat = [{"role": "user", "content": PROMPT}]
    ids = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    picture = draw_round(target, medium, plan, ids, 64)
    (Path(__file__).parent.parent / "docs" / "tree.svg").write_text(picture + "\n")


if __name__ == "__main__":
    main()
