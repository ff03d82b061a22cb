"""Break commands on purpose, repeat them, and compare the result with that of a command that nothing happened to.

    python tools/chaos.py --minutes 5
    python tools/chaos.py --minutes 60 --write docs/reliability.md
    python tools/chaos.py --faults kill memory --commands pack --seed 3

Each trial takes one command and one fault, drawn by seed. The command runs in a forked process (importing is paid
once) on tiny images; after the fault the same command is given again until it ends well, and every tensor, metric and
file must be what the undisturbed command made, bit for bit. Failures are a traceback, a command that hangs, one that
cannot be continued, a result that differs, and temporary files that stay. Needs Linux; full and read-only disks are
small mounted ones and need root, without it they are left out and the table says so.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import platform
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TERM="dumb", GLOO_SOCKET_IFNAME="lo")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open

import vitrail
import vitrail.cli
from vitrail.engine.run_folder import TIMING
from vitrail.version import __version__

for module in walk_packages(vitrail.__path__, "vitrail."):
    import_module(module.name)  # once, here, and not in every process
for name in ("torch._dynamo", "onnxruntime", "onnxscript", "rich.progress"):
    with suppress(ImportError):
        import_module(name)

BEGIN, END = "<!-- made by tools/chaos.py -->", "<!-- end -->"
LIMIT = 90.0  # seconds after which a tiny command hangs

TINY = (
    "--data {photos} --model.name vit_micro_28 --model.trunk.depth 1 --model.trunk.width 16 --model.trunk.heads 1 "
    "--data.workers 0 --data.batch 16 --optim.warmup 0 --engine.device cpu --engine.log_every 1 --optim.epochs 3 "
    "--engine.checkpoint_every 0.5 --out {out} --resume auto"
)
NO_LABELS = "--engine.evaluate_every 0 --model.head.width 8 --model.head.hidden 16"
STUDY = """
name: small
base:
  recipe: vit
  data: {{uri: {photos}, batch: 16, workers: 0}}
  model: {{name: vit_micro_28, trunk: {{depth: 1, width: 16, heads: 1}}}}
  optim: {{epochs: 1, warmup: 0}}
  engine: {{device: cpu, checkpoint_every: 0.5}}
variants: {{slow: {{}}, fast: {{optim: {{lr: 0.01}}}}}}
seeds: 1
"""


# ---- commands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """What is run (`{out}` is where it writes), and what of its result must be equal."""

    name: str
    words: str
    result: Callable[[Path], dict[str, str]]
    trains: bool = False  # has checkpoints; signals stop it and save
    codes: tuple[int, ...] = (0, 2)  # done; one sentence


def files(out: Path) -> dict[str, str]:
    """Digest of every file."""
    paths = [out] if out.is_file() else sorted(p for p in out.rglob("*") if p.is_file())
    return {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in paths}


def run_folder(out: Path) -> dict[str, str]:
    """Digests of a run's weights and predictions, its metrics without their timings, and whether it has a report."""
    result = {"report": str((out / "report.html").is_file())}
    for path in sorted((*out.glob("model/*.safetensors"), *out.glob("*.safetensors"))):
        with safe_open(path, "numpy") as stored:
            for name in stored.keys():  # noqa: SIM118, it is no mapping
                result[f"{path.name} {name}"] = hashlib.sha256(stored.get_tensor(name).tobytes()).hexdigest()[:16]
    if (out / "metrics.jsonl").is_file():
        for number, line in enumerate((out / "metrics.jsonl").read_text().splitlines()):
            values = {k: v for k, v in json.loads(line).items() if k not in TIMING}
            result[f"metrics {number}"] = json.dumps(values, sort_keys=True)
    return result


def study(out: Path) -> dict[str, str]:
    """Every run of a study, and whether it has a page."""
    result = {"page": str(any(out.rglob("report.html")))}
    for config in sorted(out.rglob("config.yaml")):
        result |= {f"{config.parent.name} {k}": v for k, v in run_folder(config.parent).items()}
    return result


COMMANDS = {
    c.name: c
    for c in (
        Command("train", f"train vit {TINY} --engine.ema 0.9 --data.augment.mixup 0.2", run_folder, True),
        Command("train, mean shift", f"train small-msf {TINY} {NO_LABELS}", run_folder, True),
        Command("train, DINO", f"train small-dino {TINY} {NO_LABELS} --objective.local_size 14", run_folder, True),
        Command(
            "train, diffusion",
            "train small-diffusion --data {photos} --data.batch 16 --data.workers 0 --optim.epochs 3 --out {out} "
            "--engine.device cpu --model.image_size 16 --engine.checkpoint_every 0.5 --engine.log_every 1 "
            "--model.trunk.width 8 --model.trunk.multipliers 1 1 --model.trunk.depth 1 --model.trunk.heads 1 "
            "--model.trunk.draws 1 --resume auto",
            run_folder,
            True,
        ),
        Command(
            "compare", "compare {study} --out {out} --jobs 1 --seconds 0", study, codes=(0, 1, 2)
        ),  # 1: a run failed
        Command("pack", "pack {photos} {out} --size 0 --workers 1", files),
        Command("augment", "augment {photos} {out} --method mixup --each 6 --batch 2", files),
        Command("export", "export {run} {out}/model.onnx", files),
        Command("inspect", "inspect {run} --data {photos} --out {out}", lambda out: dict.fromkeys(files(out), "")),
    )
}


# ---- processes --------------------------------------------------------------------------------------------------


@dataclass
class Child:
    """A command in a process group of its own."""

    pid: int
    log: Path
    code: int | None = None

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def wait(self, seconds: float = LIMIT) -> int | None:
        """The exit code (negative: the signal that ended it), or None where it hangs, and is killed."""
        end = time.monotonic() + seconds
        while self.code is None and time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.01)
        hung = self.code is None
        self.signal(signal.SIGKILL)  # its own children too
        if hung:
            os.waitpid(self.pid, 0)
        return self.code

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def start(
    words: list[str],
    log: Path,
    before: Callable[[], None] | None = None,
    output: int | None = None,
    errors: int | None = None,
) -> Child:
    """`vitrail WORDS` in a forked process; `before` is called there first. `output` and `errors` replace the log."""
    pid = os.fork()
    if pid:
        with suppress(PermissionError):  # it has done so itself
            os.setpgid(pid, pid)
        return Child(pid, log)
    code = 70
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with the tool
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output if output is not None else sink, 1)
        os.dup2(errors if errors is not None else sink, 2)
        os.closerange(3, 200)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        if before:
            before()
        code = vitrail.cli.run(words)
        sys.stdout.flush()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)


# ---- trials -----------------------------------------------------------------------------------------------------


@dataclass
class Place:
    """A command with folders of one trial, and what it makes undisturbed."""

    command: Command
    folder: Path
    inputs: dict[str, str]
    rng: random.Random
    expected: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    writes: int = 0
    size: int = 0

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def words(self) -> list[str]:
        return [w.format(out=self.out, **self.inputs) for w in self.command.words.split()]

    def start(self, before: Callable[[], None] | None = None, **streams: int | None) -> Child:
        return start(self.words(), self.folder / "log.txt", before, **streams)

    def wait_some(self) -> None:
        time.sleep(self.rng.uniform(0, self.seconds * 1.05))


class Failed(Exception):
    """A trial that shows a defect."""


def ended(child: Child, codes: tuple[int, ...]) -> int:
    """The exit code of a command; `Failed` for a hang, a traceback, or a code that says nothing."""
    code = child.wait()
    if code is None:
        raise Failed("hangs")
    if "Traceback (most recent call last)" in child.text:
        raise Failed("traceback")
    if code not in codes:
        raise Failed(f"exit code {code}")
    return code


SENTENCE = (0, 2, 130)  # done, a sentence, stopped and saved


def recovered(place: Place) -> None:
    """Give the command again, undisturbed, and compare. `Failed` where it does not end well or equal."""
    if ended(place.start(), SENTENCE) != 0:
        raise Failed("cannot be continued: " + place.folder.joinpath("log.txt").read_text().strip().splitlines()[-1])
    compare(place)


def outcome(place: Place, code: int) -> str:
    """Give a command again that ended with this code; how it came through."""
    recovered(place)
    return "finished" if code == 0 else "continued"


def compare(place: Place) -> None:
    """`Failed` where the result is not that of the undisturbed command, or temporary files stayed."""
    result = place.command.result(place.out)
    left = [p.name for p in place.out.parent.rglob("*.tmp")]
    if left:
        raise Failed(f"{len(left)} temporary files stay ({left[0]})")
    if result != place.expected:
        names = sorted(k for k in {*result, *place.expected} if result.get(k) != place.expected.get(k))
        raise Failed(f"{len(names)} results differ ({names[0]})")


FAULTS: dict[str, tuple[str, Callable[[Place], str]]] = {}


def fault(name: str, how: str) -> Callable[[Callable[[Place], str]], Callable[[Place], str]]:
    def add(function: Callable[[Place], str]) -> Callable[[Place], str]:
        FAULTS[name] = (how, function)
        return function

    return add


@fault("kill", "`kill -9` of the process group at a random moment, once to three times")
def kill(place: Place) -> str:
    for _ in range(place.rng.randint(1, 3)):
        child = place.start()
        place.wait_some()
        child.signal(signal.SIGKILL)
        child.wait()
    recovered(place)
    return "continued"


@fault("kill in a write", "`kill -9` of itself before the n-th flush to disk or after the n-th rename")
def kill_in_write(place: Place) -> str:
    name, number = place.rng.choice(("fsync", "replace")), place.rng.randint(1, max(1, place.writes))

    def before() -> None:
        real, seen = getattr(os, name), [0]

        def deadly(*args: Any, **options: Any) -> Any:
            done = real(*args, **options) if name == "replace" else None
            seen[0] += 1
            if seen[0] == number:
                os.killpg(0, signal.SIGKILL)
            return done if name == "replace" else real(*args, **options)

        setattr(os, name, deadly)

    place.start(before).wait()
    recovered(place)
    return "continued"


@fault("signal", "SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 at a random moment")
def stop_signal(place: Place) -> str:
    names = ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"] if place.command.trains else ["SIGINT", "SIGTERM"]
    number = getattr(signal, place.rng.choice(names))
    child = place.start()
    time.sleep(0.3)  # handlers are set by the command, not before it
    place.wait_some()
    child.signal(number)
    code = ended(child, (*SENTENCE, -number))
    return outcome(place, code)


@fault("pause", "SIGSTOP, a second later SIGCONT")
def pause(place: Place) -> str:
    child = place.start()
    place.wait_some()
    child.signal(signal.SIGSTOP)
    time.sleep(1)
    child.signal(signal.SIGCONT)
    ended(child, (0,))
    compare(place)
    return "finished"


@fault("full disk", "a mounted disk of 5 to 100 % of what the command writes, enlarged afterwards")
def full_disk(place: Place) -> str:
    with Disk(place.folder, int(place.size * place.rng.uniform(0.05, 1.0))) as disk:
        code = ended(place.start(), place.command.codes)
        disk.remount(f"size={4 * place.size + 2**24}")
        return outcome(place, code)


@fault("read-only disk", "a mounted disk that becomes read-only at a random moment, and writable again")
def read_only(place: Place) -> str:
    with Disk(place.folder, 4 * place.size + 2**24) as disk:
        child = place.start()
        place.wait_some()
        for _ in range(2000):  # refused while a file is open for writing
            if disk.remount("ro"):
                break
            time.sleep(0.002)
        code = ended(child, place.command.codes)
        disk.remount("rw")
        return outcome(place, code)


@fault("file size limit", "a limit on the size of files (RLIMIT_FSIZE) below the largest one")
def file_size(place: Place) -> str:
    limit = int(place.size * place.rng.uniform(0.02, 0.6))
    child = place.start(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    code = ended(child, place.command.codes)
    return outcome(place, code)


@fault("few file handles", "at most 4 to 40 open files (RLIMIT_NOFILE)")
def few_handles(place: Place) -> str:
    limit = place.rng.randint(4, 40)
    child = place.start(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)))
    code = ended(child, (0, 1, 2))
    return outcome(place, code)


@fault("little memory", "address space of 4 to 200 MB above that of the idle process (RLIMIT_AS)")
def little_memory(place: Place) -> str:
    more = int(place.rng.uniform(4, 200) * 2**20)

    def before() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))

    code = ended(place.start(before), (0, 1, 2))
    return outcome(place, code)


@fault("clock jumps", "the time of day jumps by up to ten years, back and forth, at every hundredth question")
def clock(place: Place) -> str:
    seed = place.rng.random()

    def before() -> None:
        rng, real, state = random.Random(seed), time.time, [0, 0.0]

        def jumping() -> float:
            state[0] += 1
            if state[0] % 100 == 1:
                state[1] = rng.uniform(-3e8, 3e8)
            return real() + state[1]

        time.time = jumping

    ended(place.start(before), (0,))
    compare(place)
    return "finished"


@fault("reader gone", "what is printed goes into a pipe whose reader leaves after a few bytes")
def reader_gone(place: Place) -> str:
    read, write = os.pipe()
    child = place.start(output=write, errors=write if place.rng.random() < 0.5 else None)
    os.close(write)
    os.read(read, place.rng.choice((1, 50, 500)))
    os.close(read)
    code = ended(child, SENTENCE)
    return outcome(place, code)


@fault("damaged checkpoint", "killed, then a bit of the newest checkpoint flipped, or the file cut")
def damaged(place: Place) -> str:
    child = place.start()
    place.wait_some()
    child.signal(signal.SIGKILL)
    child.wait()
    saved = sorted((place.out / "checkpoint").glob("*.safetensors"))
    if saved:
        data = bytearray(saved[-1].read_bytes())
        if place.rng.random() < 0.5:
            data[place.rng.randrange(len(data))] ^= 1 << place.rng.randrange(8)
        else:
            del data[place.rng.randrange(len(data)) :]
        saved[-1].write_bytes(bytes(data))
    recovered(place)
    return "continued"


@fault("two at once", "the same command twice at the same time: one works, the other is rejected or finds it done")
def twice(place: Place) -> str:
    first = place.start()
    time.sleep(place.rng.uniform(0, 0.5))
    second = start(place.words(), place.folder / "log2.txt")
    codes = {ended(child, place.command.codes) for child in (first, second)}
    if 0 not in codes:
        raise Failed("neither finished")
    recovered(place)
    return "finished"


@fault("lost process", "one of two processes of a run killed at a random moment; then both again")
def lost_process(place: Place) -> str:
    def pair() -> list[Child]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [
            start(
                place.words(),
                place.folder / f"log{rank}.txt",
                lambda rank=rank: os.environ.update(settings, RANK=str(rank), LOCAL_RANK=str(rank)),
            )
            for rank in (0, 1)
        ]

    reference = Place(place.command, place.folder / "both", place.inputs, place.rng)
    place, both = reference, pair  # the reference has two processes too
    place.folder.mkdir()
    for child in both():
        ended(child, (0,))
    expected = place.command.result(place.out)
    shutil.rmtree(place.out)
    children = both()
    time.sleep(place.rng.uniform(0.5, 4))
    children[lost := place.rng.randint(0, 1)].signal(signal.SIGKILL)
    children[lost].wait()
    ended(children[1 - lost], SENTENCE)
    for child in both():
        ended(child, (0,))
    place.expected = expected
    compare(place)
    return "continued"


class Disk:
    """A small disk mounted at the folder of a trial."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, max(size, 2**14)

    def __enter__(self) -> Disk:
        if not self._mount(f"size={self.size}"):
            raise PermissionError("mounting needs root")
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self.folder / "out")], check=False)

    def _mount(self, options: str) -> bool:
        out = self.folder / "out"
        out.mkdir(exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", options, "none", str(out)]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    def remount(self, options: str) -> bool:
        words = ["mount", "-o", f"remount,{options}", str(self.folder / "out")]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0


TRAINING_ONLY = {"damaged checkpoint"}
ONE_COMMAND = {"lost process": "train"}


def can_mount(folder: Path) -> bool:
    try:
        with Disk(folder, 2**16):
            return True
    except (PermissionError, FileNotFoundError):
        return False


# ---- the whole --------------------------------------------------------------------------------------------------


def make_inputs(folder: Path) -> dict[str, str]:
    """Sixty small photographs in four classes, a study, a finished run."""
    rng = np.random.default_rng(0)
    for number in range(60):
        path = folder / "photos" / f"class{number % 4}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.clip(rng.normal(60 * (number % 4), 30, (32, 32, 3)), 0, 255).astype("uint8")
        Image.fromarray(pixels).save(path)
    inputs = {"photos": str(folder / "photos"), "study": str(folder / "study.yaml"), "run": str(folder / "run")}
    (folder / "study.yaml").write_text(STUDY.format(**inputs))
    child = start([w.format(out=folder / "run", **inputs) for w in COMMANDS["train"].words.split()], folder / "log.txt")
    if child.wait() != 0:
        raise SystemExit(f"the undisturbed training failed:\n{child.text}")
    return inputs


def reference(command: Command, folder: Path, inputs: dict[str, str]) -> Place:
    """The undisturbed command: its result, seconds, writes and bytes."""
    folder.mkdir()
    place = Place(command, folder, inputs, random.Random(0))
    counts = folder / "writes.txt"

    def before() -> None:
        real = os.fsync

        def counted(handle: int) -> None:
            with counts.open("a") as stream:
                stream.write("x")
            real(handle)

        os.fsync = counted

    begun = time.monotonic()
    child = place.start(before)
    if child.wait() != 0:
        raise SystemExit(f"vitrail {' '.join(place.words())}\n{child.text}")
    place.seconds = time.monotonic() - begun
    place.writes = counts.stat().st_size if counts.exists() else 1
    place.size = sum(p.stat().st_size for p in place.out.rglob("*") if p.is_file())
    place.expected = command.result(place.out)
    print(
        f"undisturbed: {command.name:18s} {place.seconds:5.1f} s, {place.writes} writes, {place.size:,} bytes",
        flush=True,
    )
    return place


def trial(known: Place, name: str, folder: Path, seed: int) -> tuple[str, str]:
    """(outcome, detail) of one fault in one command."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    place = Place(known.command, folder, known.inputs, random.Random(seed))
    place.expected, place.seconds, place.writes, place.size = known.expected, known.seconds, known.writes, known.size
    try:
        return FAULTS[name][1](place), ""
    except Failed as failure:
        return "failed", str(failure)


def table(outcomes: dict[str, Counter[str]], missing: dict[str, str]) -> str:
    rows = [
        "| fault | how | trials | finished all the same | continued, then equal | failed |",
        "|---|---|---|---|---|---|",
    ]
    for name, (how, _) in FAULTS.items():
        count = outcomes[name]
        if name in missing:
            rows.append(f"| {name} | {how} | not tried: {missing[name]} | | | |")
        elif total := sum(count.values()):
            rows.append(
                f"| {name} | {how} | {total} | {count['finished']} | {count['continued']} | {count['failed']} |"
            )
    total = sum((count for count in outcomes.values()), Counter[str]())
    whole = sum(total.values())
    rows.append(f"| **all** | | {whole} | {total['finished']} | {total['continued']} | {total['failed']} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--commands", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--write", type=Path, help="a page whose marked part becomes the table")
    parser.add_argument("--keep", type=Path, help="a folder for what failed trials leave")
    options = parser.parse_args()
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        missing = {} if can_mount(folder) else dict.fromkeys(("full disk", "read-only disk"), "mounting needs root")
        inputs = make_inputs(folder)
        known = {n: reference(COMMANDS[n], folder / f"reference-{i}", inputs) for i, n in enumerate(options.commands)}
        outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        failures: Counter[str] = Counter()
        rng, number = random.Random(options.seed), 0
        pairs = [
            (f, c)
            for f in options.faults
            for c in options.commands
            if f not in missing and (f not in TRAINING_ONLY or COMMANDS[c].trains) and ONE_COMMAND.get(f, c) == c
        ]
        order: list[tuple[str, str]] = []
        while time.monotonic() - begun < 60 * options.minutes:
            if not order:  # every pair once, in another order each time
                order = rng.sample(pairs, len(pairs))
            name, command = order.pop()
            seed = options.seed * 10**6 + number
            outcome, detail = trial(known[command], name, folder / "trial", seed)
            outcomes[name][outcome] += 1
            number += 1
            print(f"{number:5d}  {name:20s} {command:18s} {outcome} {detail}", flush=True)
            if outcome == "failed":
                failures[f"{command}: {name}: {detail}"] += 1
                if options.keep:
                    shutil.copytree(folder / "trial", options.keep / str(number), dirs_exist_ok=True, symlinks=True)
        minutes = (time.monotonic() - begun) / 60
        where = (
            f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, PyTorch {torch.__version__}"
        )
        call = f"python tools/chaos.py --minutes {options.minutes:g} --seed {options.seed}"
        trials = f"{number} trials of {len(pairs)} pairs of a fault and a command in {minutes:.0f} minutes"
        commands = "; ".join(options.commands)
        text = (
            f"{table(outcomes, missing)}\n\n`{call}`: {trials}; vitrail {__version__}, {where}. Commands: {commands}.\n"
        )
        text += "".join(f"\n- failed {count} x: {what}" for what, count in failures.most_common())
        print(f"\n{text}")
        if options.write:
            page = options.write.read_text()
            head, rest = page.split(BEGIN)
            options.write.write_text(f"{head}{BEGIN}\n\n{text.strip()}\n\n{END}{rest.split(END)[1]}")
        return 1 if failures else 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
