"""The commands as a user types them, on tiny models."""

import io
import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from tiny import config, prompts, save_lm

from treegraft import bench, cli


def run(*words: object) -> None:
    cli.app([str(word) for word in words], standalone_mode=False)


def write_prompts(path: Path, count: int, seed: int) -> Path:
    made = prompts(count, seed=seed)
    path.write_text("\n".join(json.dumps({"prompt": " ".join(f"t{t}" for t in ids)}) for ids in made))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`--target ... --medium ...` of a tiny pair."""
    from tiny import make_pair

    folder = tmp_path_factory.mktemp("cli")
    make_pair(folder, "llama")
    return ["--target", str(folder / "llama-target"), "--medium", str(folder / "llama-medium")]


def test_the_pipeline_runs_from_profile_to_generate(models: list[str], tmp_path: Path, capsys) -> None:
    train = write_prompts(tmp_path / "train.jsonl", 8, seed=1)
    other = write_prompts(tmp_path / "other.jsonl", 3, seed=2)
    shape = ["--depth", 3, "--width", 3, "--children", 3, "--budget", 12]
    latency, log = tmp_path / "latency.json", tmp_path / "log"
    value, artifact = tmp_path / "value", tmp_path / "scheduler.json"
    run("profile", *models, *shape, "--out", latency)
    run("collect", *models, *shape, "--out", log, "--max-new-tokens", 24, train)
    run("fit-value", "--log", log, "--latency", latency, "--out", value)
    run("distill", "--value", value, "--out", artifact)

    schedules = ["--schedule", "small", "--schedule", "0b101", "--schedule", artifact]
    capsys.readouterr()
    run("evaluate", "--log", log, "--latency", latency, *schedules, "--json")
    replayed = json.loads(capsys.readouterr().out)
    run("bench", *models, *shape, *schedules, "--latency", latency, "--max-new-tokens", 16, "--json", other, train)
    benched = json.loads(capsys.readouterr().out)
    names = {"autoregressive", "small", "0b101", str(artifact)}
    for result, files in ((replayed, {"train"}), (benched, {"other", "train"})):
        assert set(result["by_file"]) == files and set(result["overall"]) == names
        for figures in [result["overall"], *result["by_file"].values()]:
            for measured in figures.values():
                assert {
                    "tokens_per_second", "speedup", "speedup_interval", "accepted_per_round", "medium_calls_per_round",
                    "rounds", "tokens",
                } <= set(measured)  # fmt: skip
    assert all(figures["text_equal"] for figures in benched["overall"].values())
    assert {figures["tokens"] for figures in benched["overall"].values()} == {11 * 16}
    assert (
        benched["overall"]["0b101"]["medium_calls_per_round"]
        > 0
        == benched["overall"]["small"]["medium_calls_per_round"]
    )

    run("verify", artifact)
    assert "sound" in capsys.readouterr().out
    with pytest.raises(ValueError, match="learned with another medium"):
        run("generate", *models[:2], "--medium", models[1], "--prompt", "t1", "--raw", "--schedule", artifact)
    run("generate", *models[:2], "--medium", models[1], "--prompt", "t1", "--raw", "--schedule", artifact, "--force",
        "--max-new-tokens", 4)  # fmt: skip
    assert len(capsys.readouterr().out.split()) == 4

    texts = set()
    for schedule in ("autoregressive", "small", "medium", artifact):
        run("generate", *models, "--raw", "--prompt", "t1 t2 t3", "--schedule", schedule, "--depth", 3,
            "--max-new-tokens", 16, "--temperature", 1.0, "--seed", 5, "--stats")  # fmt: skip
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1 and len(texts.pop().split()) == 16


def test_a_log_of_another_depth_is_refused(models: list[str], tmp_path: Path) -> None:
    train = write_prompts(tmp_path / "train.jsonl", 2, seed=1)
    latency = tmp_path / "latency.json"
    latency.write_text(json.dumps({name: {"tokens": [1], "ms": [1.0]} for name in ("target", "medium")}))
    run("collect", *models, "--depth", 2, "--out", tmp_path / "log", "--max-new-tokens", 4, train)
    from treegraft.runtime.drafting import Drafting
    from treegraft.runtime.scheduler import Artifact, Mask

    other = tmp_path / "scheduler.json"
    other.write_text(Artifact(Mask(4), Drafting(depth=3).as_dict(), {"kind": "none"}, 0, {}).to_json())
    with pytest.raises(ValueError, match="depth 3 against 2"):
        run("evaluate", "--log", tmp_path / "log", "--latency", latency, "--schedule", other)
    with pytest.raises(ValueError, match="K = 2"):
        run("evaluate", "--log", tmp_path / "log", "--latency", latency, "--schedule", "0b100")


def test_a_log_of_some_positions_is_evaluated_as_an_estimate(models: list[str], tmp_path: Path, capsys) -> None:
    train, latency = write_prompts(tmp_path / "train.jsonl", 2, seed=1), tmp_path / "latency.json"
    latency.write_text(json.dumps({name: {"tokens": [1], "ms": [1.0]} for name in ("target", "medium")}))
    for positions, exact in (("every:1", True), ("every:3", False)):
        shape = ["--depth", 2, "--max-new-tokens", 8, "--positions", positions]
        run("collect", *models, *shape, "--out", tmp_path / positions, train)
        capsys.readouterr()
        run("evaluate", "--log", tmp_path / positions, "--latency", latency, "--json")
        said = capsys.readouterr()
        assert json.loads(said.out)["exact"] is exact
        assert ("an estimate, not an exact replay" in said.err) is not exact


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["collect", "--target", "no/such/model", "--out", "LOG", "PROMPTS"], "no/such/model"),
        (["collect", "--out", "LOG", "BAD"], "bad.jsonl, line 1"),
        (["generate", "--prompt", ""], "--prompt is empty"),
        (["generate", "--prompt", "caf\udce9"], r"--prompt 'caf\udce9' holds '\udce9', which is no character"),
        (["bench", "--json", "caf\udce9.jsonl"], r"'caf\udce9.jsonl' holds '\udce9', which is no character"),
        (["generate", "--prompt", "x", "--schedule", "sometimes"], "'sometimes'"),
        (["generate", "--prompt", "x", "--cut", "worth"], "--latency"),
        (["generate", "--prompt", "x", "--depth", "99"], "--depth is 99"),
        (["evaluate", "--log", "LOG", "--what-if", "r=0.3"], "LOG"),
        (["fit-value", "--log", "LOG", "--latency", "ABSENT", "--out", "VALUE"], "ABSENT"),
        (["distill", "--value", "ABSENT", "--out", "OUT"], "ABSENT"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    words: list[str], complaint: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_prompts(tmp_path / "PROMPTS", 1, seed=1)
    (tmp_path / "bad.jsonl").write_text("{")
    places = {"BAD": tmp_path / "bad.jsonl", "PROMPTS": tmp_path / "PROMPTS"}
    monkeypatch.setattr(sys, "argv", ["treegraft", *(str(places.get(word, word)) for word in words)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and complaint in said.replace("\n", "") and "Traceback" not in said


def test_models_of_different_vocabularies_are_refused(models: list[str], tmp_path: Path) -> None:
    other = save_lm(tmp_path / "other", config("llama", layers=1), 0, swap=(3, 4))
    with pytest.raises(ValueError, match="do not share a vocabulary"):
        run("generate", models[0], models[1], "--medium", other, "--prompt", "t1")


def test_a_bench_against_hugging_face_writes_a_report(models: list[str], tmp_path: Path, capsys) -> None:
    asked = write_prompts(tmp_path / "asked.jsonl", 2, seed=3)
    words = [
        *models,
        "--depth",
        2,
        "--schedule",
        "small",
        "--max-new-tokens",
        8,
        "--report",
        tmp_path / "out" / "r.html",
    ]
    run("bench", *words, "--against", "hf", "--json", asked)
    result = json.loads(capsys.readouterr().out)
    rivals = {"generate", "prompt lookup 3", "prompt lookup 5", "prompt lookup 10", "assisted"}
    assert set(result["overall"]) == {"autoregressive", "small", "best rival", *rivals}
    assert set(result["best_rival"]) == {"asked"} and set(result["best_rival"].values()) <= rivals
    page = (tmp_path / "out" / "r.html").read_text()
    assert all(name in page for name in rivals) and page.count("<svg") == 2
    run("bench", *words, "--against", "hf", asked)
    said = capsys.readouterr().out
    assert "best rival: asked " in said and "small over the best rival: " in said


def test_a_stopped_bench_gives_the_figures_of_every_prompt_it_finished(
    models: list[str], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [write_prompts(tmp_path / f"{name}.jsonl", 4, seed=3) for name in ("one", "two")]
    words = ["bench", *models, "--depth", "2", "--schedule", "small", "--max-new-tokens", "8", "--json"]
    decoded = []

    def interrupted(target, medium, ids, plan, *rest):  # type: ignore[no-untyped-def]
        decoded.append(plan.name)
        if decoded.count("small") == 1 + 3:  # the warm-up, then within the third prompt
            signal.raise_signal(signal.SIGINT)
        return decode(target, medium, ids, plan, *rest)

    decode = bench.decode
    monkeypatch.setattr(bench, "decode", interrupted)
    assert cli.app([*words, *map(str, asked)], standalone_mode=False) == 128 + signal.SIGINT
    said = capsys.readouterr()
    assert "stopped by SIGINT; the figures are of 3 of 8 prompts" in said.err
    result = json.loads(said.out)
    assert {name: of_file["small"]["tokens"] for name, of_file in result["by_file"].items()} == {"one": 16, "two": 8}


def test_a_prompt_that_fails_costs_a_bench_none_of_the_others(
    models: list[str], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [write_prompts(tmp_path / f"{name}.jsonl", 2, seed=3) for name in ("one", "two")]
    words = ["bench", *models, "--depth", "2", "--schedule", "small", "--max-new-tokens", "8", "--json"]
    decoded: list[str] = []

    def failing(target, medium, ids, plan, *rest):  # type: ignore[no-untyped-def]
        decoded.append(plan.name)
        if plan.name == "small" and decoded.count("small") in fails:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return decode(target, medium, ids, plan, *rest)

    decode, fails = bench.decode, {1 + 2}  # the warm-up, then within the second prompt
    monkeypatch.setattr(bench, "decode", failing)
    assert cli.app([*words, *map(str, asked)], standalone_mode=False) == 1
    said = capsys.readouterr()
    assert "failed: two/1: OutOfMemoryError: tried to allocate 9 GiB" in said.err
    assert "1 failed; the figures are of 3 of 4 prompts" in said.err
    result = json.loads(said.out)
    assert {name: of_file["small"]["tokens"] for name, of_file in result["by_file"].items()} == {"one": 16, "two": 8}

    decoded, fails = [], set(range(2, 1000))
    with pytest.raises(ValueError, match="no prompt could be decoded; one/1: OutOfMemoryError"):
        run(*words, *asked)


def test_a_report_that_cannot_be_written_costs_no_figures(models: list[str], tmp_path: Path, capsys) -> None:
    asked = write_prompts(tmp_path / "asked.jsonl", 1, seed=3)
    words = ["--depth", 2, "--schedule", "small", "--max-new-tokens", 8, "--json", "--report", tmp_path]
    with pytest.raises(OSError, match=str(tmp_path)):
        run("bench", *models, *words, asked)
    assert json.loads(capsys.readouterr().out)["overall"]["small"]["tokens"] == 8


def test_stdin_that_is_not_unicode_is_refused_before_models_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for errors, complaint in (("strict", "is not UTF-8: .* 0xe9"), ("surrogateescape", r"holds '\\udce9'")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", errors))
        with pytest.raises(ValueError, match=rf"^stdin \(--prompt -\) {complaint}"):
            run("generate", "--target", "no/such/model", "--prompt", "-")


def test_what_is_said_keeps_every_character(capsys) -> None:
    cli._say("log:100:/[red]x[/]: failed: a :smile: b")
    assert capsys.readouterr().err == "log:100:/[red]x[/]: failed: a :smile: b\n"


@pytest.mark.parametrize("limit", [[], ["--medium-calls", 0], ["--medium-calls", 1], ["--medium-calls", 9]])
def test_collect_counts_positions_whatever_the_schedules(models: list[str], tmp_path: Path, capsys, limit) -> None:
    wanted = write_prompts(tmp_path / "wanted.jsonl", 2, seed=1)
    run("collect", *models, "--depth", 3, *limit, "--max-new-tokens", 5, "--out", tmp_path / "log", wanted)
    assert "2 prompts collected, 0 failed; 8 positions" in capsys.readouterr().err


def test_failed_prompts_are_named_and_give_exit_code_1(models: list[str], tmp_path: Path, capsys) -> None:
    wanted = tmp_path / "wanted.jsonl"
    wanted.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("t1 t2", "t1 " * 600)))
    words = ["collect", *models, "--depth", "1", "--max-new-tokens", "3", "--out", str(tmp_path / "log"), str(wanted)]
    assert cli.app(words, standalone_mode=False) == 1
    said = capsys.readouterr().err
    assert "failed: wanted/2: " in said and "1 prompts collected, 1 failed" in said
    wanted.write_text(json.dumps({"prompt": "t1 t2"}) + "\n" + json.dumps({"prompt": "t3"}) + "\n")
    assert not cli.app(words, standalone_mode=False)
    assert "2 prompts collected, 0 failed" in capsys.readouterr().err


def test_options_of_the_ray_engine_are_refused_without_it(models: list[str], tmp_path: Path) -> None:
    wanted = write_prompts(tmp_path / "wanted.jsonl", 1, seed=1)
    with pytest.raises(ValueError, match="for --engine ray"):
        run("collect", *models, "--num-cpus", 2, "--out", tmp_path / "log", wanted)


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--prompt=x", "--target=~/absent"],
        ["generate", "--prompt=x", "--target=MODEL", "--medium=~/absent"],
        ["generate", "--prompt=x", "--schedule=~/absent.json"],
        ["generate", "--prompt=x", "--latency=~/absent", "--cut=worth"],
        ["draw", "--prompt=x", "--schedule=~/absent.json"],
        ["bench", "--schedule=~/absent.json", "PROMPTS"],
        ["bench", "--schedule=small", "~/absent"],
        ["collect", "--out=log", "~/absent"],
        ["merge", "log", "~/absent"],
        ["fit-value", "--log=~/absent", "--what-if=r=0.3", "--out=value"],
        ["evaluate", "--log=~/absent", "--what-if=r=0.3"],
        ["distill", "--value=~/absent", "--out=scheduler.json"],
        ["inspect", "~/absent.json"],
        ["verify", "~/absent.json"],
        ["export", "~/absent.json", "--out=out.h"],
    ],
    ids=" ".join,
)
def test_a_tilde_in_what_is_read_is_the_home_directory(
    models: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 1, seed=1)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    places = {"PROMPTS": str(prompts), "--target=MODEL": f"--target={models[1]}"}
    with pytest.raises((ValueError, OSError), match=f"{tmp_path}/absent"):
        run(*(places.get(word, word) for word in words))


def test_a_tilde_in_what_is_written_is_the_home_directory(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    train, shape = write_prompts(home / "train.jsonl", 8, seed=1), ["--depth", 2, "--width", 2, "--children", 2]
    few = ["--max-new-tokens", 6]
    run("profile", *models, *shape, "--out=~/latency.json")
    run("collect", *models, *shape, *few, "--out=~/log", "~/train.jsonl")
    run("merge", "~/merged", "~/log")
    run("fit-value", "--log=~/merged", "--latency=~/latency.json", "--out=~/value")
    run("distill", "--value=~/value", "--out=~/scheduler.json")
    run("export", "~/scheduler.json", "--out=~/scheduler.h")
    run("bench", *models, *shape, *few, "--limit", 1, "--report=~/report.html", train)
    run("draw", *models, *shape, *few, "--raw", "--prompt=t1", "--schedule=medium", "--out=~/round.svg")
    made = {"latency.json", "log", "merged", "value", "scheduler.json", "scheduler.h", "report.html", "round.svg"}
    assert made <= {path.name for path in home.iterdir()} and not list(here.iterdir())


def test_a_tilde_without_a_home_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)  # a container's: the password file knows no such user
    with pytest.raises(ValueError, match=r"~/absent\.json: you have no home directory; give the whole path"):
        run("inspect", "~/absent.json")


def test_a_path_may_look_like_markup(tmp_path) -> None:  # type: ignore[no-untyped-def]
    folder = save_lm(tmp_path / "model[" / "b]", config("llama"), 0)
    run("generate", "--target", folder, "--raw", "--prompt", "t1 t2", "--max-new-tokens", 4)
    run("profile", "--target", folder, "--medium", folder, "--out", tmp_path / "latency[" / "b].json")


def test_a_prompt_may_begin_with_a_tilde(models: list[str], capsys) -> None:
    run("generate", *models, "--raw", "--prompt", "~/t1", "--max-new-tokens", 2)
    assert len(capsys.readouterr().out.split()) == 2
