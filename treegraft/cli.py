"""The command line: one command a stage, and `demo` for all of them. Results go to stdout, all else to stderr."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from treegraft.runtime.drafting import Drafting

app = typer.Typer(
    help="Learn when a tree-based speculative decoder should call its dearer drafter, and decode by it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console(stderr=True)


def _home(value: Any) -> Any:
    """Any path option's value, or a list of them, with `~` for the home directory, which no shell sees in `--out=~/x`.

    Raises ValueError for a user without one.
    """
    if isinstance(value, list):
        return [_home(one) for one in value]
    if not str(value).startswith("~"):
        return value
    expanded = os.path.expanduser(str(value))
    if expanded.startswith("~/"):
        raise ValueError(f"{value}: you have no home directory; give the whole path")
    return type(value)(expanded)


Target = Annotated[str, typer.Option(callback=_home, help="Hugging Face id, folder, .gguf file, or 'default'.")]
Medium = Annotated[str, typer.Option(callback=_home, help="The medium drafter, named likewise, or 'default-medium'.")]
Device = Annotated[str, typer.Option(help="Where models run, e.g. cpu or cuda.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16, float64, or auto: bfloat16 where the device multiplies it, else float32."
    ),
]
MediumDtype = Annotated[str | None, typer.Option(help="The medium drafter's; by default as --dtype. Any is lossless.")]
Prompts = Annotated[
    list[str], typer.Argument(callback=_home, help="Prompt files or URIs (JSON Lines with turns, messages or prompt).")
]
LogFolder = Annotated[str, typer.Option("--log", callback=_home, help="Log folder, or its URI.")]
MaxNewTokens = Annotated[int, typer.Option(help="Answer tokens at most.", min=1)]
Limit = Annotated[int | None, typer.Option(help="The first N prompts of each file.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Depth = Annotated[int, typer.Option(help="Drafting steps a round (K).")]
Width = Annotated[int, typer.Option(help="Frontier nodes a step (W).")]
Children = Annotated[int, typer.Option(help="Next tokens a frontier node (m).")]
Budget = Annotated[int, typer.Option(help="Verification nodes beside the root (B).")]
Pool = Annotated[int | None, typer.Option(help="Tree nodes a medium call may process (C); no limit if absent.")]
MediumCalls = Annotated[int | None, typer.Option(help="Medium steps a round; no limit if absent.")]
CutOption = Annotated[
    str | None,
    typer.Option(
        "--cut", help="Verification size: worth (the default with --latency), none, or a limit on log s (-2.5)."
    ),
]
Latency = Annotated[Path | None, typer.Option(callback=_home, help="Latency profile, from `treegraft profile`.")]
WhatIf = Annotated[
    str | None,
    typer.Option(
        help="Instead of --latency: r=0.3 (a call takes 0.3 target forwards, nothing else costs), or flat times in ms, "
        "t_tgt=82,t_mid=48."
    ),
]
Rho = Annotated[float | None, typer.Option(help="Tokens per ms for `worth`; by default 1 / T_tgt(1).")]
Schedules = Annotated[
    list[str],
    typer.Option(
        "--schedule", callback=_home, help="small, medium, a mask such as 0b00101, or a scheduler.json. Repeatable."
    ),
]
ArtifactFile = Annotated[Path, typer.Argument(callback=_home, help="An artifact, from `treegraft distill`.")]
Force = Annotated[bool, typer.Option("--force", help="Accept an artifact that was learned with other models.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", min=0.0)]
TopK = Annotated[int, typer.Option(help="0: off.", min=0)]
TopP = Annotated[float, typer.Option(help="1: off.", min=0.0, max=1.0)]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="1: off.", min=0.0)]
Seed = Annotated[int, typer.Option(help="Of the sampling noise.", min=0, max=2**63 - 1)]

DEFAULTS = Drafting()
SOME_FAILED = 1  # the exit code of collect and bench where all was done that could be, and some prompts failed


def main() -> None:
    """Run the command line; a mistake of the user's is one line on stderr and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    try:
        _check_arguments(sys.argv[1:])
        app()
    except Exception as error:
        if os.environ.get("TREEGRAFT_DEBUG"):
            raise
        expected = isinstance(error, ValueError | OSError)
        hint = "" if expected else f" ({type(error).__name__}; TREEGRAFT_DEBUG=1 shows where)"
        _say(f"treegraft: {' '.join(str(error).split())}{hint}", style="red")
        raise SystemExit(2) from error


def _check_arguments(words: list[str]) -> None:
    """Raise ValueError for an argument that is not Unicode: no tokenizer takes it, no table or report can show it."""
    from treegraft.runtime.text import not_unicode

    for before, word in zip(["", *words], words):
        if flaw := not_unicode(word):
            shown = f"{before} {word!r}" if before.startswith("--") else repr(word)
            raise ValueError(f"{shown} {flaw}")


def _say(text: str, style: str | None = None) -> None:
    """One line on stderr, whatever the terminal's width."""
    console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _say_failed(failed: list[dict[str, Any]]) -> None:
    for failure in failed:
        _say(f"failed: {failure['file']}/{failure['prompt']}: {failure['error']}")


@app.command()
def profile(
    out: Annotated[Path, typer.Option(callback=_home, help="Where the profile goes (JSON).")],
    target: Target = "default",
    medium: Medium = "default-medium",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    medium_dtype: MediumDtype = None,
    depth: Depth = DEFAULTS.depth,
    width: Width = DEFAULTS.width,
    children: Children = DEFAULTS.children,
    budget: Budget = DEFAULTS.budget,
) -> None:
    """Measure what a target forward and a medium call cost here, by tokens and context."""
    from treegraft.data.prompts import Conversation, read_prompts, shipped
    from treegraft.runtime.measure import measure_profile

    models = _load_pair(target, medium, device, dtype, medium_dtype)
    if models[0].tokenizer.chat_template:
        prompt = Conversation(read_prompts(shipped("train"), 1)[0], models[0].tokenizer).ids(0)
    else:
        prompt = models[0].tokenizer("Once upon a time there was a tree. Once upon a time")["input_ids"]
    console.print("measuring ...")
    measured = measure_profile(*models, prompt, Drafting(depth, width, children, budget))
    measured.save(out)
    one, sixteen = float(measured.target(1, 256)), float(measured.target(17, 256))
    _say(
        f"{out}: at 256 tokens of context a target forward takes {one:.1f} ms for one token and {sixteen:.1f} ms "
        f"for 17, a medium call {float(measured.medium(1, 256)):.1f} ms for one and "
        f"{float(measured.medium(4, 256)):.1f} ms for 4"
    )


@app.command()
def collect(
    prompts: Prompts,
    out: Annotated[str, typer.Option(callback=_home, help="Log folder, or its URI; an interrupted one is continued.")],
    target: Target = "default",
    medium: Medium = "default-medium",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    medium_dtype: MediumDtype = None,
    max_new_tokens: MaxNewTokens = 128,
    limit: Limit = None,
    depth: Depth = DEFAULTS.depth,
    width: Width = DEFAULTS.width,
    children: Children = DEFAULTS.children,
    budget: Budget = DEFAULTS.budget,
    pool: Pool = None,
    medium_calls: MediumCalls = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    positions: Annotated[
        str, typer.Option(help="Which are logged: every:N or sample:F. Only every:1 replays exactly.")
    ] = "every:1",
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try those of failed.jsonl again.")] = False,
    shard: Annotated[
        str | None, typer.Option(help="i/n: the i-th of n equal runs of the prompts, from 1/n on; `merge` joins them.")
    ] = None,
    engine: Annotated[Literal["local", "ray"], typer.Option(help="local: this machine; ray: many.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="ray: of a running cluster, or auto; by default one of this machine is made.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes, each with models of its own. local: 1; ray: what there is room for.", min=1),
    ] = None,
    num_gpus: Annotated[float, typer.Option(help="ray: GPUs a worker.", min=0)] = 0.0,
    num_cpus: Annotated[float, typer.Option(help="ray: CPUs a worker.", min=0)] = 1.0,
) -> None:
    """Decode prompts while forking every invoke-or-skip decision; log signals and realised value."""
    from treegraft.collect.collector import Engine, check_folder, collect_with
    from treegraft.collect.positions import Positions
    from treegraft.collect.processes import process_engine
    from treegraft.collect.ray_engine import ray_engine
    from treegraft.collect.worker import Sampling, Settings, Worker
    from treegraft.data.files import location
    from treegraft.data.prompts import read_prompts, take_shard

    how = Settings(
        Drafting(depth, width, children, budget, pool, medium_calls),
        Sampling(temperature, top_k, top_p, repetition_penalty, seed),
        max_new_tokens,
        Positions.parse(positions),
    )
    folder = location(out)
    wanted = read_prompts(prompts, limit)
    if shard is not None:
        wanted = take_shard(wanted, shard)
    check_folder(folder)
    load = partial(Worker.load, target, medium, device, dtype, medium_dtype, how)
    if engine == "local" and (address, num_gpus, num_cpus) != (None, 0.0, 1.0):
        raise ValueError("--address, --num-gpus and --num-cpus are for --engine ray")
    with ExitStack() as stack:
        with console.status(escape(f"loading {target} and {medium}")):
            running: Engine
            if engine == "ray":
                running = stack.enter_context(ray_engine(load, address, workers, num_gpus, num_cpus))
            elif workers and workers > 1:
                running = stack.enter_context(process_engine(load, workers))
            else:
                running = load()
        stopped = stack.enter_context(_stop_signals("what was collected is kept, and the same command goes on"))
        update = stack.enter_context(_progress("collecting"))
        manifest, failed = collect_with(running, wanted, folder, retry_failed, update, lambda: bool(stopped))
    _say_failed(failed)
    tables = [part[table] for part in manifest["parts"] for table in ("decisions", "leaves")]
    logged, size = sum(t["rows"] for t in tables[1::2]) // how.drafting.schedules, sum(t["bytes"] for t in tables)
    _say(
        f"{out}: {len(manifest['parts'])} prompts collected, {len(failed)} failed; {logged} positions, "
        f"{size / max(logged, 1):.0f} bytes each"
    )
    if failed:
        _say(f"{folder / 'failed.jsonl'} names them; the same command with --retry-failed tries them again")
    if stopped:
        _say(f"stopped by {stopped[0].name}; the same command goes on at the next prompt", style="red")
        raise typer.Exit(128 + stopped[0])
    if failed:
        raise typer.Exit(SOME_FAILED)


@app.command()
def merge(
    out: Annotated[str, typer.Argument(callback=_home, help="New log folder, or its URI.")],
    logs: Annotated[list[str], typer.Argument(callback=_home, help="Logs to join, in this order: folders or URIs.")],
) -> None:
    """Join logs of the same models and settings, such as shards, into one."""
    from treegraft.collect.merge import merge

    merged = merge(out, logs)
    _say(f"{out}: {merged.prompts} prompts of {len(logs)} logs, {merged.duplicates} duplicates dropped, "
         f"{merged.failed} failed")  # fmt: skip


@contextmanager
def _stop_signals(at_once: str) -> Iterator[list[signal.Signals]]:
    """Note a first SIGINT or SIGTERM, so that the work in hand is finished; a second one acts at once, as it says."""
    stopped: list[signal.Signals] = []
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: Any) -> None:
        stopped.append(signal.Signals(number))
        # Not as it was before: a script's background commands start with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _say("finishing the prompt in hand; once more stops at once")

    for number in usual:
        signal.signal(number, note)
    try:
        yield stopped
    except KeyboardInterrupt:  # typer exits with 130, without a word
        _say(f"stopped at once; {at_once}", style="red")
        raise
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@app.command("fit-value")
def fit_value(
    log: LogFolder,
    out: Annotated[Path, typer.Option(callback=_home, help="Where the value model goes (a folder).")],
    latency: Latency = None,
    what_if: WhatIf = None,
    model: Annotated[str, typer.Option(help="lightgbm or linear.")] = "lightgbm",
    seed: Seed = 0,
) -> None:
    """Fit the expected worth of calling the medium drafter, and select the signals that predict it."""
    from treegraft.data.files import location
    from treegraft.value_system.value import fit_value

    report = fit_value(location(log), _priced(latency, what_if), out, kind=model, seed=seed)
    _say(f"{out}: signals {', '.join(report['signals'])}; held-out speed over autoregressive decoding:")
    _print_figures(report["cross_validated"])


@app.command()
def distill(
    value: Annotated[Path, typer.Option(callback=_home, help="Folder from fit-value.")],
    out: Annotated[Path, typer.Option(callback=_home, help="The artifact (JSON).")],
    kind: Annotated[str, typer.Option(help="rules, tree or auto.")] = "auto",
) -> None:
    """Compress the value model into a scheduler that ships."""
    from treegraft.distill.distill import distill

    report = distill(value, out, kind=kind)
    _say(report["summary"])


@app.command()
def inspect(artifact: ArtifactFile) -> None:
    """Say what an artifact will do: where it calls the medium drafter, how often, and what that is worth."""
    from treegraft.distill.describe import describe
    from treegraft.runtime.scheduler import load_artifact

    print(describe(load_artifact(artifact)))


@app.command()
def verify(artifact: ArtifactFile) -> None:
    """Check an artifact's schema and hash, and recompute its test vectors."""
    from treegraft.runtime.verify import verify

    sound = verify(artifact)
    print(f"{artifact}: sound; {len(sound.vectors)} test vectors agree; sha256 {sound.sha256}")


@app.command()
def export(
    artifact: ArtifactFile,
    out: Annotated[Path, typer.Option(callback=_home, help="Where the export goes.")],
    to: Annotated[str, typer.Option("--format", help="c (one C99 header) or onnx.")] = "c",
) -> None:
    """Write an artifact's decision for a decoder that runs no Python."""
    from treegraft.distill.export import to_c, to_onnx
    from treegraft.runtime.scheduler import load_artifact

    if to not in ("c", "onnx"):
        raise ValueError(f"--format {to!r}: give c or onnx")
    sound = load_artifact(artifact)
    made = to_c(sound).encode() if to == "c" else to_onnx(sound).SerializeToString()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(made)
    _say(f"{out}: {len(made)} bytes, from {artifact}; check a port with its test vectors (docs/artifact.md)")


@app.command()
def evaluate(
    log: LogFolder,
    latency: Latency = None,
    what_if: WhatIf = None,
    schedule: Schedules = ["small", "medium"],  # noqa: B006
    cut: CutOption = None,
    rho: Rho = None,
    json_out: Json = False,
) -> None:
    """Replay schedules on a log, exactly and without a model, and price them with a latency profile."""
    from treegraft.data.log import read_log
    from treegraft.runtime.scheduler import Mask
    from treegraft.value_system.estimate import stand_in
    from treegraft.value_system.gains import evaluate

    priced = _priced(latency, what_if)
    manifest, answers = read_log(log)
    exact = all(len(answer.positions) == answer.length - 1 for answer in answers)
    if not exact:
        answers = stand_in(answers)
        _say(f"an estimate, not an exact replay: {log} holds the positions {manifest['positions']}", style="yellow")
    drafting = Drafting(**manifest["drafting"])
    plans = _plans(schedule, drafting, cut, priced, rho, same_trees=log)
    result = {**evaluate(answers, plans, priced), "exact": exact}
    _report(result, json_out)
    if not json_out:
        print_gains(result)
    for plan in plans:
        if isinstance(plan.schedule, Mask):
            _say(f"{plan.name}: --rho {result['rho'][plan.name]:.6g} (tokens per ms) suits it here")


@app.command()
def bench(
    prompts: Prompts,
    target: Target = "default",
    medium: Medium = "default-medium",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    medium_dtype: MediumDtype = None,
    schedule: Schedules = ["small", "medium"],  # noqa: B006
    max_new_tokens: MaxNewTokens = 128,
    limit: Limit = None,
    depth: Depth = DEFAULTS.depth,
    width: Width = DEFAULTS.width,
    children: Children = DEFAULTS.children,
    budget: Budget = DEFAULTS.budget,
    pool: Pool = None,
    medium_calls: MediumCalls = None,
    cut: CutOption = None,
    latency: Latency = None,
    rho: Rho = None,
    against: Annotated[
        Literal["hf"] | None,
        typer.Option(
            help="hf: also transformers' generate, prompt lookup and assisted generation, on the same models."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(callback=_home, help="Write bars, tables and the time split to this HTML file.")
    ] = None,
    force: Force = False,
    json_out: Json = False,
) -> None:
    """Decode prompts live with every schedule, interleaved in one process, and compare speed and texts.

    Stopped by Ctrl-C or SIGTERM, it finishes the prompt in hand and gives the figures so far.
    """
    from treegraft import bench as live
    from treegraft.data.prompts import read_prompts

    drafting = Drafting(depth, width, children, budget, pool, medium_calls)
    wanted = read_prompts(prompts, limit)
    plans = _plans(schedule, drafting, cut, _profile(latency), rho)
    if against:
        models = _load_pair(target, medium, device, dtype, medium_dtype)
        rivals = live.hugging_face(models[1])
    else:
        models = _load_needed(plans, target, medium, device, dtype, medium_dtype)
        rivals = []
    _check_models(plans, models, force)
    with _stop_signals("nothing is kept") as stopped, _progress("benching") as update:
        records, failed = live.run(*models, wanted, plans, max_new_tokens, update, rivals, lambda: bool(stopped))
    summary = live.summarise_live(records, rivals)
    _report(summary, json_out)
    if rivals and not json_out:
        _print_rivals(summary, [plan.name for plan in plans], live.BEST_RIVAL)
    _say_failed(failed)
    finished = len({(record.file, record.prompt) for record in records})
    if stopped or failed:
        cause = f"stopped by {stopped[0].name}" if stopped else f"{len(failed)} failed"
        _say(f"{cause}; the figures are of {finished} of {len(wanted)} prompts", style="red")
    if report:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(live.report_page(summary))
    if stopped:
        raise typer.Exit(128 + stopped[0])
    if failed:
        raise typer.Exit(SOME_FAILED)


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="The user's message ('-' reads stdin).")],
    target: Target = "default",
    medium: Medium = "default-medium",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    medium_dtype: MediumDtype = None,
    schedule: Annotated[
        str, typer.Option(callback=_home, help="small, medium, a mask, autoregressive, or a scheduler.json.")
    ] = "small",
    max_new_tokens: MaxNewTokens = 256,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the text as it is.")] = False,
    depth: Depth = DEFAULTS.depth,
    width: Width = DEFAULTS.width,
    children: Children = DEFAULTS.children,
    budget: Budget = DEFAULTS.budget,
    pool: Pool = None,
    medium_calls: MediumCalls = None,
    cut: CutOption = None,
    latency: Latency = None,
    rho: Rho = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    monitor: Annotated[
        bool, typer.Option(help="Draft less where drafting makes the text slower than one-token steps.")
    ] = True,
    force: Force = False,
    stats: Annotated[bool, typer.Option("--stats", help="Say on stderr what the rounds did.")] = False,
) -> None:
    """Decode one prompt and stream the answer."""
    from treegraft.runtime.decoder import Decoder
    from treegraft.runtime.text import not_unicode

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin (--prompt -) is not {error.encoding.upper()}: {error}") from error
    if flaw := not_unicode(text):
        raise ValueError(f"{'stdin (--prompt -)' if prompt == '-' else '--prompt'} {flaw}")
    if not text:
        raise ValueError("--prompt is empty; give some text")
    drafting = Drafting(depth, width, children, budget, pool, medium_calls)
    plan = _plans([schedule], drafting, cut, _profile(latency), rho)[0]
    models = _load_needed([plan], target, medium, device, dtype, medium_dtype)
    _check_models([plan], models, force)
    decoder = Decoder(*models, plan, monitor=monitor)
    stream = decoder.stream(
        text if raw else [{"role": "user", "content": text}], max_new_tokens, temperature, top_k, top_p,
        repetition_penalty, seed,
    )  # fmt: skip
    for piece in stream:
        print(piece, end="", flush=True)
    print()
    if stats:
        console.print(_stats(stream.answer), markup=False)


def _stats(decoded: Any) -> str:
    rounds, seconds = decoded.rounds, decoded.total_ms / 1e3
    said = (
        f"{len(decoded.tokens)} tokens in {seconds:.2f} s ({len(decoded.tokens) / seconds:.1f} tokens/s, first after "
        f"{decoded.first_token_ms:.0f} ms), {len(rounds)} rounds"
    )
    if rounds:
        figures = {
            "accepted": [r.accepted for r in rounds],
            "medium calls": [r.medium_calls for r in rounds],
            "nodes drafted": [r.drafted for r in rounds],
            "nodes verified": [r.kept for r in rounds],
        }
        said += "; a round: " + ", ".join(f"{sum(v) / len(rounds):.2f} {name}" for name, v in figures.items())
        said += "; ms: " + ", ".join(f"{part} {sum(r.ms[part] for r in rounds):.0f}" for part in rounds[0].ms)
    if decoded.fallbacks:
        said += f"; {decoded.fallbacks} decisions by the fallback schedule"
    for drop in decoded.drops:
        said += (
            f"; {drop.schedule} from token {drop.position} on, since {drop.ms:.1f} ms a token were more than "
            f"{drop.one_token_ms:.1f} without drafting"
        )
    if decoded.drift is not None:
        said += f"; T_tgt / T_mid {decoded.drift:.2f} times the artifact's"
    return said


@app.command()
def draw(
    prompt: Annotated[str, typer.Option(help="The user's message.")],
    out: Annotated[Path | None, typer.Option(callback=_home, help="Where the picture goes (SVG).")] = None,
    number: Annotated[
        int | None,
        typer.Option("--round", help="Which one, from 1; by default one with both drafters and most accepted.", min=1),
    ] = None,
    target: Target = "default",
    medium: Medium = "default-medium",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    medium_dtype: MediumDtype = None,
    schedule: Annotated[
        str, typer.Option(callback=_home, help="small, medium, a mask, or a scheduler.json.")
    ] = "0b00110",
    max_new_tokens: MaxNewTokens = 64,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the text as it is.")] = False,
    depth: Depth = DEFAULTS.depth,
    width: Width = DEFAULTS.width,
    children: Children = DEFAULTS.children,
    budget: Budget = DEFAULTS.budget,
    pool: Pool = None,
    medium_calls: MediumCalls = None,
    cut: CutOption = None,
    latency: Latency = None,
    rho: Rho = None,
    force: Force = False,
) -> None:
    """Decode one prompt and draw one of its rounds: who proposed, what was verified and accepted, and why."""
    from treegraft import draw as drawing
    from treegraft.data.prompts import Conversation, Prompt

    drafting = Drafting(depth, width, children, budget, pool, medium_calls)
    plan = _plans([schedule], drafting, cut, _profile(latency), rho)[0]
    models = _load_needed([plan], target, medium, device, dtype, medium_dtype)
    _check_models([plan], models, force)
    asked = Prompt("prompt", "0", text=prompt) if raw else Prompt("prompt", "0", turns=(prompt,))
    ids = Conversation(asked, models[0].tokenizer).ids(0)
    rounds = drawing.watch(*models, plan, ids, max_new_tokens)
    if len(rounds) < (number or 1):
        raise ValueError(f"--round {number or 1}: the answer took {len(rounds)} rounds")
    drawn = rounds[number - 1] if number else drawing.most_telling(rounds)
    Console().print(drawing.in_terminal(drawn))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(drawing.svg(drawn), encoding="utf-8")
        _say(f"{out}: round {drawn.number} of {len(rounds)}")


@app.command()
def demo(out: Annotated[Path, typer.Option(callback=_home, help="Where everything goes.")] = Path("runs/demo")) -> None:
    """The whole pipeline on the default models: profile, collect, fit, distill, then decode faster by it."""
    from treegraft.demo import for_readers, run_demo

    summary = run_demo(out, console, _progress)
    print_table("the shipped bench prompts, live", for_readers(summary))


def _load_pair(target: str, medium: str, device: str, dtype: str, medium_dtype: str | None) -> tuple[Any, Any]:
    from treegraft.runtime.models import check_pair, load_model

    with console.status(escape(f"loading {target} and {medium}")):
        models = load_model(target, device, dtype), load_model(medium, device, medium_dtype or dtype)
    check_pair(*models)
    return models


def _load_needed(plans: list[Any], target: str, medium: str, *where: Any) -> tuple[Any, Any]:
    """The target and the medium drafter, which is not needed where the default one is never called."""
    from treegraft.runtime.models import DEFAULT_MEDIUM, load_model
    from treegraft.runtime.scheduler import Mask

    if medium != DEFAULT_MEDIUM or any(plan.drafting.depth and plan.schedule != Mask(0) for plan in plans):
        return _load_pair(target, medium, *where)
    with console.status(escape(f"loading {target}")):
        return load_model(target, *where[:2]), None


def _profile(latency: Path | None) -> Any:
    from treegraft.runtime.latency import LatencyProfile

    if latency is None:
        return None
    return LatencyProfile.load(latency)


def _priced(latency: Path | None, what_if: str | None) -> Any:
    """The latency profile that a log is priced with: exactly one of --latency and --what-if."""
    from treegraft.runtime.latency import Curve, LatencyProfile

    if (latency is None) == (what_if is None):
        raise ValueError("give one of --latency (a profile from `treegraft profile`) and --what-if (such as r=0.3)")
    if latency is not None:
        return LatencyProfile.load(latency)
    assert what_if is not None
    fields = [part.partition("=")[::2] for part in what_if.split(",")]
    try:
        values = {name.strip(): float(value) for name, value in fields}
    except ValueError:
        values = {}
    known = len(fields) == len(values) and sorted(values) in (["r"], ["t_mid", "t_tgt"])
    if not known or not all(1e-6 <= value <= 1e6 for value in values.values()):
        raise ValueError(f"--what-if {what_if!r}: give r=0.3, or t_tgt=82,t_mid=48 in ms, numbers from 1e-6 to 1e6")
    if "r" in values:
        return LatencyProfile.what_if(values["r"])
    return LatencyProfile(Curve((1,), (values["t_tgt"],)), Curve((1,), (values["t_mid"],)), machine=what_if)


def _plans(
    schedules: list[str],
    drafting: Drafting,
    cut: str | None,
    latency: Any,
    rho: float | None,
    same_trees: str | None = None,
) -> list[Any]:
    """Schedules by name, mask or artifact file; an artifact brings its own drafting and cut."""
    from treegraft.runtime.plan import DEFAULT_CUT, make_cut, make_plan

    chosen = None
    plans = []
    for name in dict.fromkeys(schedules):
        if chosen is None and not name.endswith(".json"):
            chosen = make_cut(cut or "worth", latency, rho) if cut or latency else DEFAULT_CUT
        plan = make_plan(name, drafting, chosen)
        if same_trees and plan.drafting != drafting and plan.drafting.depth:
            different = [k for k, v in drafting.as_dict().items() if plan.drafting.as_dict()[k] != v]
            raise ValueError(
                f"{name} was made for other trees than {same_trees} holds: "
                + ", ".join(f"{k} {plan.drafting.as_dict()[k]} against {drafting.as_dict()[k]}" for k in different)
                + "; collect a log with its settings, or distill again"
            )
        plans.append(plan)
    return plans


def _check_models(plans: list[Any], models: tuple[Any, Any], force: bool) -> None:
    """Refuse an artifact that was learned with other models; by `force`, say so and go on."""
    from treegraft.runtime.plan import check_models
    from treegraft.runtime.scheduler import ScheduleError

    for plan in plans:
        try:
            check_models(plan, *models)
        except ScheduleError as error:
            if not force:
                raise
            _say(str(error), style="yellow")


class _progress:
    """A progress bar on stderr with an ETA; entering gives `update(done, total)`."""

    def __init__(self, title: str):
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console)
        self._title = title

    def __enter__(self) -> Callable[[int, int], None]:
        self._bar.start()
        task = self._bar.add_task(self._title)
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _report(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=1))
        return
    for file, figures in result["by_file"].items():
        print_table(file, figures)
    print_table("overall", result["overall"])


def _print_figures(figures: dict[str, Any]) -> None:
    """What fit-value cross-validated, a line each: speedups over autoregressive, then the gain over the best mask."""
    for name, found in figures.items():
        ratio, (low, high) = (found[key] for key in (("speedup", "speedup_interval") if "speedup" in found
                                                     else ("gain", "interval")))  # fmt: skip
        _say(f"  {name}: {ratio:.3f} times (95 % {low:.3f} .. {high:.3f})")


def _print_rivals(summary: dict[str, Any], ours: list[str], best: str) -> None:
    """Which rival is each file's best, and what our schedules gain over it."""
    print("best rival: " + ", ".join(f"{file} {name}" for file, name in summary["best_rival"].items()))
    for name in ours:
        over = summary["overall"][name]["over"][best]
        low, high = over["interval"]
        print(f"{name} over the best rival: {over['gain']:.3f}, 95 % {low:.3f} .. {high:.3f}, paired by prompt")


def print_table(title: str, figures: dict[str, dict[str, Any]]) -> None:
    """One table: a row a schedule."""
    from treegraft.report import texts

    table = Table(title=f"{title} (accepted tokens and medium calls a round)", title_justify="left", box=box.SIMPLE)
    for column in ("schedule", "tokens/s", "speedup", "95 %", "accepted", "calls", "text"):
        table.add_column(column, justify="left" if column == "schedule" else "right", no_wrap=column != "schedule")
    live = any("text_equal" in m for m in figures.values())
    a_round = ("accepted_per_round", "medium_calls_per_round")  # unknown of a decoder that is not ours
    for name, m in figures.items():
        low, high = m["speedup_interval"]
        text = texts(m) if live else "replayed"
        table.add_row(
            name, f"{m['tokens_per_second']:.2f}", f"{m['speedup']:.3f}", f"{low:.2f}..{high:.2f}",
            *((f"{m[of]:.2f}" for of in a_round) if m["rounds"] else ("", "")), text,
        )  # fmt: skip
    Console().print(table)


def print_gains(result: dict[str, Any]) -> None:
    """A table of gains in percent for each schedule, a row a benchmark; overall is the benchmarks' mean."""
    measures = {
        "gain_over_better_endpoint": "better endpoint",
        "gain_over_best_fixed": "best mask",
        "gain_over_best_fixed_hindsight": "in hindsight",
        "oracle_gap_share": "oracle's gap",
    }
    for name in result["overall"]:
        table = Table(title=f"{name}: gain in %, with its 95 % interval, over", title_justify="left", box=box.SIMPLE)
        table.add_column("benchmark")
        for column in measures.values():
            table.add_column(column, justify="right", no_wrap=True)
        for file, figures in (*result["by_file"].items(), ("overall", result["overall"])):
            found = [figures[name][measure] for measure in measures if measure in figures[name]]
            cells = [
                f"{100 * f['value']:+.1f}\n{100 * f['interval'][0]:+.1f}..{100 * f['interval'][1]:+.1f}" for f in found
            ]
            if cells:
                table.add_row(file, *cells)
        if table.row_count:
            Console().print(table)


if __name__ == "__main__":
    main()
