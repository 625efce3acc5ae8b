"""How a learned tree carries over: to a benchmark that it never saw, and to a profile that it was not learned for.

    python benchmarks/transfer.py LOG 0.15 0.3 latency.json

Prints two tables of gains over the better endpoint. In the first, trees are learned on all prompt files but one and
judged on that one. In the second, trees learned under one profile (row) are judged under another (column) on held-out
prompts, with the verification cut of the profile that they are judged under.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from value_figures import END, interval, priced

from treegraft.data.log import read_log
from treegraft.distill.distill import learn
from treegraft.runtime.drafting import Drafting
from treegraft.value_system.gains import Fold, gains, held_out_ms, make_fold, make_folds, rivals
from treegraft.value_system.value import ValueModel


def main(log: Path, profiles: Annotated[list[str], typer.Argument(help="r, or a latency.json")]) -> None:
    manifest, answers = read_log(log)
    drafting = Drafting(**manifest["drafting"])
    files = list(dict.fromkeys(answer.file for answer in answers))
    of_file = np.array([files.index(answer.file) for answer in answers])
    by_file = [make_fold(answers, np.flatnonzero(of_file == i)) for i in range(len(files))]
    by_prompt = list(make_folds(answers))

    def judged(learned: str, folds: list[Fold]) -> dict[str, dict]:
        """The gains of trees learned under one profile, by the profile that they are judged under."""
        of = priced(learned)
        trees = [learn("tree", f.train, ValueModel().fit(f.train, of, drafting), of, drafting) for f in folds]
        made = {}
        for name in profiles if folds is by_prompt else [learned]:
            ms = np.zeros(len(answers))
            for fold, tree in zip(folds, trees):
                ms[fold.index] = held_out_ms(fold, tree, priced(name), drafting)
            made[name] = gains(answers, ms, rivals(answers, folds, priced(name), drafting))
        return made

    prompts = {name: judged(name, by_prompt) for name in profiles}
    print(f"| learned on the other files | overall | {' | '.join(files)} |\n| --- | --- {'| --- ' * len(files)}|")
    for name in profiles:
        found = judged(name, by_file)[name]
        cells = [found["overall"], *(found["by_file"][file] for file in files)]
        print(f"| {name} |", " | ".join(interval(cell[END]) for cell in cells), "|")
        seen = prompts[name][name]
        cells = [seen["overall"], *(seen["by_file"][file] for file in files)]
        print(f"| {name}, all files seen |", " | ".join(interval(cell[END]) for cell in cells), "|", flush=True)
    print(f"\n| learned under | {' | '.join(f'judged under {name}' for name in profiles)} |")
    print("|" + " --- |" * (1 + len(profiles)))
    for name, row in prompts.items():
        print(f"| {name} |", " | ".join(interval(row[under]["overall"][END]) for under in profiles), "|")


if __name__ == "__main__":
    typer.run(main)
