"""Queues of commands side by side: order, what waits for what, and the end of the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

SCRIPT = Path(__file__).parents[1] / "tools" / "lanes.py"


def lanes(plan: Any, folder: Path, *flags: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    call = [sys.executable, str(SCRIPT), str(folder / "plan.yaml"), "--out", str(folder / "out"), *flags]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}  # no accelerator's server
    done = subprocess.run(call, capture_output=True, text=True, check=False, env=environment, timeout=60)
    times = folder / "out" / "times.jsonl"
    return done, [json.loads(line) for line in times.read_text().splitlines()] if times.exists() else []


def test_commands_wait_for_what_they_come_after_and_failures_are_counted(tmp_path: Path) -> None:
    plan = {
        "environment": {"WORD": "hello"},
        "alone": [{"name": "first", "command": "echo $WORD"}],
        "lanes": {
            "one": [{"name": "slow", "command": f"sleep 0.4; echo made > {tmp_path}/file"}],
            "two": [
                {"name": "reads", "command": f"cat {tmp_path}/file", "after": ["slow"]},
                {"name": "fails", "command": "exit 3"},
                {"name": "never", "command": "echo never", "after": ["fails"]},
                {"name": "long", "command": "echo long", "minutes": 9},
                {"name": "last", "command": "echo last >&2"},
            ],
        },
    }
    done, lines = lanes(plan, tmp_path, "--minutes", "2")
    assert done.returncode == 1
    assert done.stderr.startswith("3 commands did not succeed; see ")
    assert {line["name"]: line["status"] for line in lines if "status" in line} == {
        "first": 0,
        "slow": 0,
        "reads": 0,
        "fails": 3,
        "last": 0,
    }
    assert {line["name"]: line["left_out"] for line in lines if "left_out" in line} == {
        "never": "after",
        "long": "time",
    }
    texts = {name: (tmp_path / "out" / f"{name}.log").read_text() for name in ("first", "reads", "last")}
    assert texts == {"first": "hello\n", "reads": "made\n", "last": "last\n"}
    assert lines[0]["name"] == "first"


def test_the_last_commands_have_the_machine_to_themselves_and_lanes_leave_them_their_time(tmp_path: Path) -> None:
    endless = {"name": "endless", "command": "trap 'exit 0' TERM; sleep 30 & wait", "minutes": 0}
    short = {"name": "short", "command": "true", "minutes": 0}
    last = [{"name": "last", "command": "echo $NAME", "minutes": 1}]
    done, lines = lanes({"lanes": {"one": [endless], "two": [short]}, "last": last}, tmp_path, "--minutes", "1.35")
    assert done.returncode == 0, done.stderr
    ended = [line["name"] for line in lines if line.get("status") == 0]
    assert ended == ["short", "endless", "last"]
    assert (tmp_path / "out" / "last.log").read_text() == "last\n"


def test_what_runs_at_the_end_of_the_time_may_still_clean_up(tmp_path: Path) -> None:
    command = "trap 'echo kept; exit 0' TERM; sleep 30 & wait"
    plan = {"lanes": {"one": [{"name": "endless", "command": command, "minutes": 0}]}}
    done, lines = lanes(plan, tmp_path, "--minutes", "0.02")
    assert done.returncode == 0, done.stderr
    assert lines[-1]["status"] == 0
    assert lines[-1]["at"] < 15
    assert (tmp_path / "out" / "endless.log").read_text() == "kept\n"


def test_a_detached_queue_is_waited_for(tmp_path: Path) -> None:
    plan = {"lanes": {"one": [{"name": "sleeps", "command": "sleep 0.5; echo done"}]}}
    assert lanes(plan, tmp_path, "--minutes", "2", "--detach")[0].returncode == 0
    done, lines = lanes(plan, tmp_path, "--wait", "30")
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == ["sleeps", "sleeps"]
    assert lines[-1]["status"] == 0


@pytest.mark.parametrize(
    ("jobs", "problem"),
    [
        ([{"name": "a", "command": "true"}] * 2, "a is there twice"),
        ([{"name": "a", "command": "true", "after": ["b"]}], "there is no b to wait for"),
        ([{"name": "a"}], "a command has name, command, minutes, after and mps; not so {'name': 'a'}"),
    ],
)
def test_a_wrong_plan_is_one_sentence(jobs: Any, problem: str, tmp_path: Path) -> None:
    done, lines = lanes({"alone": jobs}, tmp_path)
    assert (done.returncode, lines) == (1, [])
    assert done.stderr == f"{tmp_path / 'plan.yaml'}: {problem}\n"
