import argparse
import io
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bench
import cli
import compare
import data
import dpo
import draw
import evaluate
import finetune
import grpo
import memory
import model as models
import ppo
import preferences
import pretrain
import rewards
import sample
import tricks

ROOT = Path(data.__file__).parent
SCRIPTS = [data, rewards, models, sample, evaluate, pretrain, finetune, ppo, grpo, preferences, dpo, compare, draw, memory, bench, tricks]


@pytest.fixture
def said(quick, monkeypatch, capsys):
    """A function that runs a script as the shell would: its exit status, and what it printed on stdout and stderr."""

    def run(script, *argv):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, argv)])
        status = 0
        try:
            data.main_guard(script.main)
        except SystemExit as end:  # any other exception would be a traceback, and fails the test
            status = end.code
        out, err = capsys.readouterr()
        return (1, out, f"{err}{status}\n") if isinstance(status, str) else (status or 0, out, err)

    return run


def complaint(said, script, *argv):
    """The one line that a script prints on stderr when it cannot go on."""
    status, _, err = said(script, *argv)
    assert status not in (0, None) and err.count("\n") == 1 and err.startswith(f"{script.__name__}.py: "), (status, err)
    return err


# ---- help and requirements


@pytest.mark.parametrize(
    ("package", "script", "argv"),
    [
        ("scipy", compare, []),
        ("matplotlib", draw, ["compare.json"]),
        ("huggingface_hub", data, []),
        ("rustbpe", data, ["stories.txt", "--valid", "stories.txt", "--train-tokenizer"]),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(said, workshop, monkeypatch, package, script, argv):
    monkeypatch.chdir(workshop)
    if script is data:  # nothing is written, but should it be, then here
        monkeypatch.setattr(data, "FOLDER", workshop)
    (workshop / "stories.txt").write_text("One day.")
    monkeypatch.setitem(sys.modules, package, None)
    line = complaint(said, script, *argv)
    assert package in line and "pip install -r requirements-extra.txt" in line


def test_a_line_takes_the_place_of_a_bar_also_of_a_full_one(monkeypatch, capsys):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    cli.progress(1, 2, "half")
    cli.progress(2, 2, "all")
    cli.say("done")
    assert "\n" not in terminal.getvalue() and terminal.getvalue().endswith("100% all\x1b[K\r\x1b[K")
    assert capsys.readouterr().out == "done\n"


@pytest.mark.parametrize("error, status", [(cli.Problem("no such thing"), "script.py: no such thing"), (KeyboardInterrupt(), 130)])
def test_what_ends_a_script_takes_the_place_of_its_bar(monkeypatch, capsys, error, status):
    def main():
        cli.progress(1, 3)
        raise error

    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(SystemExit) as ended:
        cli.main_guard(main)
    assert ended.value.code == status and terminal.getvalue().endswith("33% \x1b[K\r\x1b[K")


def test_requirements_are_pinned():
    for name in "requirements.txt", "requirements-extra.txt":
        lines = (ROOT / name).read_text().splitlines()
        assert lines and all(re.match(r"[\w-]+==\d", line) for line in lines)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_answers_help(said, script):
    status, out, err = said(script, "--help")
    assert (status, err) == (0, "") and script.__doc__.splitlines()[0] in out


@pytest.mark.parametrize("script", [each for each in SCRIPTS if each is not rewards])
def test_the_help_names_every_default(said, script, monkeypatch):
    parsers, parse = [], argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda parser, *rest: (parsers.append(parser), parse(parser, *rest))[1])
    said(script, "--help")
    valued = [action for action in parsers[0]._actions if action.nargs != 0 and action.default not in (None, argparse.SUPPRESS)]
    for action in valued:
        help = action.help or ""
        assert "(default" in help, f"{action.option_strings or action.dest} does not say its default"
        if isinstance(action.default, int | float):
            assert f"(default {action.default:g})" in help


def test_the_main_job_needs_no_flag_but_minutes_and_kl(said, monkeypatch):
    seen = []
    monkeypatch.setattr(grpo, "train", lambda run, method, kl: (seen.append((run.args.minutes, kl)), run.writer.close()))
    assert said(grpo, "--minutes", 10, "--kl", 0.05)[0] == 0
    assert said(grpo, "--overwrite")[0] == 0
    assert seen == [(10, 0.05)] * 2  # and these are the defaults


# ---- one line for what the reader can put right


@pytest.mark.parametrize("script", [ppo, grpo])
@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--minutes", "0"], "--minutes: '0' is not a number of minutes above 0"),
        (["--minutes", "-1"], "--minutes: '-1' is not"),
        (["--minutes", "inf"], "--minutes: 'inf' is not"),
        (["--minutes", "ten"], "--minutes: 'ten' is not"),
        (["--rollouts", "0"], "--rollouts: '0' is not a whole number of 1 or more"),
        (["--rollouts", "2.5"], "--rollouts: '2.5' is not"),
        (["--kl", "-1"], "--kl: '-1' is not a finite number of 0 or more"),
        (["--kl", "nan"], "--kl: 'nan' is not"),
        (["--kl", "inf"], "--kl: 'inf' is not"),
        (["--name", "../x"], "--name: '../x' is not a plain name"),
        (["--name", ""], "--name: '' is not"),
        (["--name", "a/b"], "--name: 'a/b' is not a plain name"),
        (["--name", "a/../../../x"], "--name: 'a/../../../x' is not a plain name"),
        (["--name", "x\n"], "--name: 'x\\n' is not a plain name"),
        (["--name", "x" * 101], "is not a plain name: 100 letters"),
        (["--seed", "-1"], "--seed: '-1' is not"),
        (["--device", "nosuch"], "there is no device 'nosuch' here"),
        (["--steps", "3"], "unrecognized arguments: --steps"),
        (["--minute", "3"], "unrecognized arguments: --minute"),
        (["--from", "nowhere.pt"], "there is no checkpoint nowhere.pt"),
        (["--from", "."], "cannot read ."),
    ],
)
def test_bad_flags_of_a_run_get_one_line_and_leave_no_folder(said, workshop, script, argv, part):
    assert part in complaint(said, script, *argv)
    assert [path.name for path in workshop.iterdir()] == ["checkpoints"]
    assert [path.name for path in (workshop / "checkpoints").iterdir()] == ["finetuned"]


@pytest.mark.parametrize("script", [pretrain, finetune])
@pytest.mark.parametrize("argv", [["--minutes", "0"], ["--minutes", "-1"], ["--steps", "0"], ["--name", "../x"], ["--rollouts", "1"]])
def test_the_other_training_scripts_are_as_strict(said, script, argv):
    assert argv[0] in complaint(said, script, *argv)


@pytest.mark.parametrize("script", [ppo, sample, evaluate, models])
def test_a_missing_a_truncated_and_a_foreign_checkpoint_get_one_line(said, workshop, script):
    whole = (workshop / "checkpoints/finetuned/model.pt").read_bytes()
    flag = [] if script is evaluate else ["--from"]
    (workshop / "short.pt").write_bytes(whole[: len(whole) // 2])
    (workshop / "empty.pt").write_bytes(b"")
    (workshop / "text.pt").write_text("Once upon a time.")
    models.save({"config": {"layers": 1}}, workshop / "other.pt")
    for name in "missing", "short", "empty", "text", "other":
        assert f"{name}.pt" in complaint(said, script, *flag, workshop / f"{name}.pt"), name


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["", "kite", "brave"], "'' is no word"),
        (["kite", "r1ver", "brave"], "'r1ver' is no word"),
        (["kite", "two words", "brave"], "'two words' is no word"),
        ([""], "three words, not 1"),
        (["kite", "river"], "three words, not 2"),
        (["--count", "0"], "--count"),
        (["--count", "many"], "--count"),
        (["--device", "nosuch"], "'nosuch'"),
    ],
)
def test_bad_input_to_sample_gets_one_line(said, argv, part):
    assert part in complaint(said, sample, *argv)


def test_one_story_an_ask_can_never_be_a_pair_and_is_refused(said):
    assert "--stories: '1' is not a whole number of 2 or more" in complaint(said, preferences, "--stories", 1)


@pytest.mark.parametrize(
    ("script", "flag"),
    [(bench, "--json"), (compare, "--json"), (evaluate, "--json"), (memory, "--json"), (tricks, "--json"), (preferences, "--out")],
)
def test_a_folder_where_a_file_is_to_be_written_is_found_out_at_once(said, workshop, script, flag):
    for path in workshop, ".":
        assert f"{flag}: '{path}' is not a file: it is a folder" in complaint(said, script, flag, path)


def test_a_missing_token_file_names_the_command_that_makes_it(said, workshop, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", workshop)
    for script in pretrain, finetune:
        assert "run python data.py" in complaint(said, script)


@pytest.mark.parametrize("blocked", ["checkpoints/ppo", "checkpoints/ppo/kl-0.05", "runs", "runs/ppo"])
def test_a_file_where_a_folder_should_be_gets_one_line(said, workshop, blocked):
    (workshop / blocked).parent.mkdir(parents=True, exist_ok=True)
    (workshop / blocked).write_text("in the way")
    assert f"cannot write to {workshop / blocked}" in complaint(said, ppo, "--rollouts", 1)


def test_a_refused_run_a_missing_state_and_a_bad_reward_get_one_line(said, monkeypatch):
    assert "nothing to resume" in complaint(said, grpo, "--resume")
    assert said(grpo, "--rollouts", 1)[0] == 0
    assert "--overwrite" in complaint(said, grpo, "--rollouts", 1)
    monkeypatch.setattr(ppo, "words_used", lambda *_: math.inf)
    assert "is inf, not a finite number" in complaint(said, grpo, "--rollouts", 1, "--overwrite")


def test_ctrl_c_twice_exits_with_130_and_no_traceback(said, monkeypatch):
    monkeypatch.setattr(ppo, "train", lambda run, *_: [run.writer.close(), run._stop(2, None), run._stop(2, None)])
    status, _, err = said(ppo)
    assert (status, err) == (130, "")


# ---- as the shell runs them


@pytest.mark.parametrize(
    ("argv", "status", "out", "err"),
    [
        (["grpo.py", "--help"], 0, "(default 0.05)", ""),
        (["sample.py", "kite", "r1ver", "brave"], 1, "", "sample.py: 'r1ver' is no word that a story could use: letters only\n"),
        (["rewards.py", "The kite flew over the river.", "kite", "river", "brave"], 0, "0.667", ""),
    ],
)
def test_the_scripts_run_from_any_folder(tmp_path, argv, status, out, err):
    done = subprocess.run([sys.executable, ROOT / argv[0], *argv[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == status and out in " ".join(done.stdout.split()) and done.stderr == err
    assert not list(tmp_path.iterdir())
