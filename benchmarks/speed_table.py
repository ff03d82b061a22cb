"""The tables of docs/results/speed.md and the README's line on speed, from what benchmarks measured.

    python benchmarks/speed_table.py                          write both from benchmarks/history.jsonl
    python benchmarks/speed_table.py --check                  exit code 1 where they are not what that file says
    python benchmarks/speed_table.py --run --data imagenette  measure everything on this machine first

Each table is of the newest call of its benchmark that has all its figures (training on a CPU: of each machine's), so
that what is compared was measured side by side. `--run` calls the scripts with `--history`, those for CUDA only where
there is an accelerator; its whole table takes about 10 minutes there and 30 on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
HISTORY, PAGE, README = ROOT / "benchmarks/history.jsonl", ROOT / "docs/results/speed.md", ROOT / "README.md"
WORKS = ("DeiT-S inference", "ViT-B inference", "DeiT-S training", "ViT-B training")
SMALL_WORKS = ("ViT-Ti/4 32 px training", "ViT-S/4 32 px training")
OURS = ("DeiT-Ti", "DeiT-S", "DeiT-S, ATS sampled", "PatchConvNet-S60", "CaiT-XXS24", "ResMLP-S12")
OTHERS = ("MobileNetV4-S", "EfficientNet-Lite0", "FastViT-T8", "RepViT-M1")
RUNTIMES = ("ours", "ours optimized", "timm", "onnxruntime", "OpenVINO", "int8")
LOADERS = {
    "jpeg": "`--data.loader jpeg`: decoded on the GPU",
    "host": "`--data.loader host`",
    "timm": "timm's loader",
}


@dataclass(frozen=True)
class Call:
    """A line of the history."""

    date: str
    benchmark: str
    machine: str
    figures: Mapping[str, float]

    @property
    def source(self) -> str:
        return f"`python benchmarks/{self.benchmark}`, {self.machine}, {self.date}."


def read_calls(file: Path = HISTORY) -> list[Call]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [Call(line["date"], line["benchmark"], line["machine"], line["figures"]) for line in lines]


def newest(calls: Sequence[Call], benchmark: str, kind: str, wanted: Iterable[str]) -> Call | None:
    """The last call of a benchmark on a kind of machine (text of its name) that has all these figures."""
    fitting = [c for c in calls if c.benchmark == benchmark and kind in c.machine and set(wanted) <= c.figures.keys()]
    return fitting[-1] if fitting else None


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def gpu_call(calls: Sequence[Call]) -> Call | None:
    wanted = [f"{work}, {who}, images/s" for work in WORKS for who in ("ours", "timm compiled")]
    return newest(calls, "gpu.py", "NVIDIA", wanted)


def gpu_table(calls: Sequence[Call]) -> list[str]:
    call = gpu_call(calls)
    if call is None:
        return ["Not measured yet."]
    rows = []
    for work in (*WORKS, *SMALL_WORKS):
        ours, eager, compiled = (
            call.figures.get(f"{work}, {who}, images/s") for who in ("ours", "timm", "timm compiled")
        )
        if ours is not None and compiled is not None:
            cells = ("" if value is None else f"{value:,.0f}" for value in (eager, compiled, ours))
            rows.append((work, *cells, f"**{ours / compiled:.2f}**"))
    return [*table(("images/s", "timm", "timm compiled", "vitrail", "of timm compiled"), rows), "", call.source]


def jpeg_table(calls: Sequence[Call]) -> list[str]:
    call = newest(calls, "jpeg.py", "NVIDIA", ["synthetic, images/s", "jpeg, two cores, images/s"])
    whole = newest(calls, "jpeg.py", "NVIDIA", ["host, 16 cores, images/s", "timm, 16 cores, images/s"])
    if call is None:
        return ["Not measured yet."]
    rows = []
    for name, title in LOADERS.items():
        of, cores = (call, "two") if name == "jpeg" else (whole, "16")
        speed = None if of is None else of.figures.get(f"{name}, {cores} cores, images/s")
        if of is not None and speed is not None:
            share = speed / of.figures["synthetic, images/s"]
            rows.append((title, cores, f"{speed:,.0f}", f"{share:.2f}"))
    titles = ("training DeiT-S from JPEG files", "host cores", "images/s", "of input that is already there")
    return [*table(titles, rows), "", call.source]


def latency_table(calls: Sequence[Call], kind: str, runtimes: Sequence[str]) -> list[str]:
    call = newest(calls, "latency.py", kind, ["model DeiT-Ti, batch 1, ours, p50 ms"])
    if call is None:
        return ["Not measured yet."]
    rows = []
    for batch in (1, 8):
        for model in (*OURS, *OTHERS):
            p50, p99 = (
                {way: call.figures.get(f"model {model}, batch {batch}, {way}, {part} ms") for way in runtimes}
                for part in ("p50", "p99")
            )
            known = {way: ms for way, ms in p50.items() if ms is not None}
            if known:
                cells = (" / ".join(milliseconds(ms) for ms in (p50[way], p99[way]) if ms is not None) for way in p50)
                rows.append((model, str(batch), *cells, min(known, key=lambda way: known[way])))
    return [*table(("ms, p50 / p99", "batch", *runtimes, "fastest"), rows), "", call.source]


def milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def training_table(calls: Sequence[Call]) -> list[str]:
    """The newest call of each machine, the newest machine first."""
    machines = {call.machine: call for call in calls if call.benchmark == "cpu_training.py" and "cpu" in call.machine}
    parts = ("training", "loading", "step")
    titles = ("images/s, of timm's model with a DataLoader", "training", "of that loading", "of that a step")
    lines = []
    for call in sorted(machines.values(), key=lambda call: call.date, reverse=True):
        rows = []
        for setting in dict.fromkeys(name.rpartition(" ")[0] for name in _settings(call)):
            ratios = (call.figures.get(f"{setting} {part}, ours / timm") for part in parts)
            rows.append((f"`{setting}`", *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)))
        lines += [*table(titles, rows), "", call.source, ""]
    return lines[:-1] or ["Not measured yet."]


def _settings(call: Call) -> list[str]:
    return [name.removesuffix(", ours / timm") for name in call.figures]


TABLES: dict[str, Callable[[Sequence[Call]], list[str]]] = {
    "gpu": gpu_table,
    "jpeg": jpeg_table,
    "latency-cuda": lambda calls: latency_table(calls, "NVIDIA", ("ours", "ours optimized", "timm", "timm compiled")),
    "latency-cpu": lambda calls: latency_table(calls, "cpu", RUNTIMES),
    "training-cpu": training_table,
}


def readme_line(calls: Sequence[Call]) -> list[str]:
    call = gpu_call(calls)
    if call is None:
        return []
    ratios = [call.figures[f"{w}, ours, images/s"] / call.figures[f"{w}, timm compiled, images/s"] for w in WORKS]
    small, base, small_training, base_training = (f"{ratio:.2f}" for ratio in ratios)
    place = call.machine.partition(",")[0].removeprefix("NVIDIA ")
    return [
        f"- **Fast**: beside timm compiled, on one {place}, DeiT-S inference {small} and training {small_training} "
        f"times, ViT-B {base} and {base_training} ([speed](docs/results/speed.md))."
    ]


def filled(text: str, name: str, lines: Sequence[str]) -> str:
    """The text with these lines between the markers of this name. Raises `ValueError` without markers."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"no markers {begin.strip()} and {end} to write between")
    return before + begin + "\n".join(lines) + "\n" + end + after


def written(calls: Sequence[Call]) -> dict[Path, str]:
    """What the files should be."""
    page = PAGE.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        page = filled(page, name, ["", *make(calls), ""])
    return {PAGE: page, README: filled(README.read_text(encoding="utf-8"), "speed", readme_line(calls))}


def measure(data: str) -> None:
    """Call all scripts; one that fails is named, and the others go on."""
    import torch

    here = "cuda" if torch.cuda.is_available() else "cpu"
    calls = [["latency.py", "--device", "cpu"], ["cpu_training.py", "--data", data]]
    if here == "cuda":
        calls = [["gpu.py"], ["jpeg.py", "--data", data], ["latency.py", "--device", "cuda", "--together"], *calls]
    for script, *words in calls:
        command = [sys.executable, str(ROOT / "benchmarks" / script), *words, "--history"]
        if code := subprocess.run(command, check=False).returncode:
            print(f"{script} ended with {code}; its table stays as it is", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--data", default="imagenette", help="photographs for loading")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.run:
        measure(options.data)
    files = written(read_calls())
    if options.check:
        stale = [str(path) for path, text in files.items() if path.read_text(encoding="utf-8") != text]
        for path in stale:
            print(f"{path} is not what the history says: python benchmarks/speed_table.py")
        return int(bool(stale))
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
