"""How fast images come from tar shards behind a URL, compared with local files and with a plain download.

    python benchmarks/streams.py [--images 2000] [--shards 8] [--size 160] [--rounds 5] [--json]
    python benchmarks/streams.py --s3        # first epochs from a simulated S3 (moto), litdata among them

A threaded server of static files runs in a process of its own on the loopback address, so these figures are those of
the software: they say nothing of S3, whose latency and bandwidth are other ones. All ways read every image once, at
random; each round goes through all ways, figures are medians and ratios are medians of the rounds' ratios.

read        bytes of the images, as an accelerator's decoder takes them
decode      RGB images; a packed set holds pixels, so nothing is decoded there
first       with an empty cache, from opening the data to the last image; the download is one GET per shard by as many
            threads as vitrail has, written to disk, and then the local tars are opened and read

WebDataset (`pip install webdataset`) is compared where it is installed: it reads shards in their order, through curl,
into a shuffle buffer. So is litdata, from the simulated S3: it reads a format of its own (chunks of about the size of a
shard, written before the clock starts), which a server of files cannot list.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rounds import where

from vitrail.data.dataset import Split
from vitrail.data.open import open_source
from vitrail.data.pack import pack
from vitrail.data.sources.stream import _FETCHED

BUCKET = "bench"
AWS = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}
MOTO = """
from threading import Event
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
Event().wait()
"""


class Handler(SimpleHTTPRequestHandler):
    """Files of a folder, by ranges."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and a short body are two writes

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        with path.open("rb") as stream:
            stream.seek(start)
            self.wfile.write(stream.read(end - start))

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""


def write_shards(folder: Path, images: int, shards: int, side: int) -> None:
    noise = np.random.default_rng(0)
    for shard, numbers in enumerate(np.array_split(np.arange(images), shards)):
        with tarfile.open(folder / f"train-{shard:03d}.tar", "w") as tar:
            for number in numbers.tolist():
                stream = io.BytesIO()
                coarse = Image.fromarray(noise.integers(0, 256, (12, 12, 3), dtype=np.uint8))
                coarse.resize((side, side), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
                for name, content in ((f"{number}.jpg", stream.getvalue()), (f"{number}.cls", b"%d" % (number % 10))):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def read(split: Split, order: list[int]) -> None:
    for row in order:
        split.reader.stored(int(split.index[row]))  # type: ignore[attr-defined]


def decode(split: Split, order: list[int]) -> None:
    for row in order:
        split.read(row)


def first_epoch(
    url: str, shards: int, order: list[int], work: Callable[[Split, list[int]], None], options: str
) -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        work(open_source(f"{url}/train-{{000..{shards - 1:03d}}}.tar{options}")["train"], order)


def downloaded(url: str, shards: int, order: list[int], work: Callable[[Split, list[int]], None] | None) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def get(name: str) -> None:
            with urllib.request.urlopen(f"{url}/{name}") as answer:
                Path(folder, name).write_bytes(answer.read())

        with ThreadPoolExecutor(_FETCHED) as pool:
            list(pool.map(get, [f"train-{shard:03d}.tar" for shard in range(shards)]))
        if work is not None:
            work(open_source(folder)["train"], order)


def web_dataset(url: str, shards: int, form: str) -> None:
    import webdataset

    urls = f"{url}/train-{{000..{shards - 1:03d}}}.tar"
    data = webdataset.WebDataset(urls, shardshuffle=shards).shuffle(1000)
    for _ in data.decode("pil") if form == "decode" else data:
        pass


def chunk(image: tuple[int, bytes]) -> dict[str, Any]:
    """An image as litdata stores it."""
    return {"image": image[1], "class": image[0]}


def write_chunks(tars: Path, folder: Path, shards: int) -> None:
    """The images of the tars as litdata's chunks."""
    import litdata

    split = open_source(str(tars))["train"]
    images = [(int(split.labels[row]), split.reader.stored(int(split.index[row]))) for row in range(len(split))]  # type: ignore[attr-defined]
    size = sum(len(content) for _, content in images) // shards + 1
    litdata.optimize(chunk, images, str(folder), chunk_bytes=size, num_workers=1, verbose=False)


def lit_data(form: str) -> None:
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it expects https of every S3
    with tempfile.TemporaryDirectory() as cache:
        place = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        for row in litdata.StreamingDataset(f"s3://{BUCKET}/chunks", cache, shuffle=True, storage_options=place):
            if form == "decode":
                Image.open(io.BytesIO(row["image"])).convert("RGB")


def upload(folder: Path) -> None:
    """Every file below a folder into the bucket."""
    import s3fs

    system = s3fs.S3FileSystem()
    system.mkdir(BUCKET)
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        system.put_file(str(path), f"{BUCKET}/{path.relative_to(folder)}", ACL="public-read")


def first_ways(url: str, stream: str, shards: int, order: list[int]) -> dict[str, Callable[[], None]]:
    """All ways of a first epoch of the tars below `url`, which vitrail reads as `stream`."""
    ways: dict[str, Callable[[], None]] = {
        "first, download alone": partial(downloaded, url, shards, order, None),
        "first, download, then read": partial(downloaded, url, shards, order, read),
        "first, stream, read": partial(first_epoch, stream, shards, order, read, ""),
        "first, download, then decode": partial(downloaded, url, shards, order, decode),
        "first, stream, decode": partial(first_epoch, stream, shards, order, decode, ""),
    }
    if find_spec("webdataset"):
        ways["first, WebDataset, read"] = partial(web_dataset, url, shards, "read")
        ways["first, WebDataset, decode"] = partial(web_dataset, url, shards, "decode")
    if stream.startswith("s3:") and find_spec("litdata"):
        ways["first, litdata, read"] = partial(lit_data, "read")
        ways["first, litdata, decode"] = partial(lit_data, "decode")
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--s3", action="store_true", help="first epochs, from a simulated S3 (moto)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        served = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=asked.serve))
        print(served.server_address[1], flush=True)
        served.serve_forever()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tars, packed = Path(folder, "tars"), Path(folder, "packed")
        tars.mkdir()
        write_shards(tars, asked.images, asked.shards, asked.size)
        command = [sys.executable, __file__, "--serve", folder]
        if asked.s3:
            command = [sys.executable, "-c", MOTO]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            if asked.s3:
                os.environ |= {**AWS, "AWS_ENDPOINT_URL": url}
                if find_spec("litdata"):
                    write_chunks(tars, tars / "chunks", asked.shards)
                upload(tars)
                race(asked, first_ways(f"{url}/{BUCKET}", f"s3://{BUCKET}", asked.shards, in_order(asked)), tars)
            else:
                measure(asked, url, tars, packed)
        finally:
            server.kill()
            server.wait()


def in_order(asked: argparse.Namespace) -> list[int]:
    order: list[int] = np.random.default_rng(0).permutation(asked.images).tolist()
    return order


def measure(asked: argparse.Namespace, url: str, tars: Path, packed: Path) -> None:
    pack(open_source(str(tars)), packed, size=0)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        served = open_source(f"{url}/packed/pack.json")["train"]
        url = f"{url}/tars"
        pattern = f"{url}/train-{{000..{asked.shards - 1:03d}}}.tar"
        warm = open_source(pattern)["train"]
        ranged = open_source(f"{pattern}?read=ranged")["train"]
        local, mapped = open_source(str(tars))["train"], open_source(str(packed))["train"]
        order = in_order(asked)
        ways: dict[str, Callable[[], None]] = {
            "read, local tars": partial(read, local, order),
            "read, stream, warm cache": partial(read, warm, order),
            "read, stream, ranged": partial(read, ranged, order),
            "decode, local packed": partial(decode, mapped, order),
            "decode, stream of packed, warm": partial(decode, served, order),
            "decode, local tars": partial(decode, local, order),
            "decode, stream, warm cache": partial(decode, warm, order),
        }
        race(asked, ways | first_ways(url, url, asked.shards, order), tars)


def race(asked: argparse.Namespace, ways: dict[str, Callable[[], None]], tars: Path) -> None:
    """Time all ways in rounds, and print their rates and ratios."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(asked.rounds + 1):
        for name, work in ways.items():
            began = time.perf_counter()
            work()
            if turn:  # the first round fills the page cache
                seconds[name].append(time.perf_counter() - began)
    compared = {
        "read, stream, warm cache": "read, local tars",
        "read, stream, ranged": "read, local tars",
        "decode, local packed": "decode, local tars",
        "decode, stream of packed, warm": "decode, local packed",
        "decode, stream, warm cache": "decode, local tars",
        "first, stream, read": "first, download, then read",
        "first, stream, decode": "first, download, then decode",
        "first, WebDataset, read": "first, download, then read",
        "first, WebDataset, decode": "first, download, then decode",
        "first, litdata, read": "first, download, then read",
        "first, litdata, decode": "first, download, then decode",
    }
    ratio = {
        name: statistics.median(b / a for a, b in zip(seconds[name], seconds[to], strict=True))
        for name, to in compared.items()
        if name in seconds
    }
    speed = {name: asked.images / statistics.median(times) for name, times in seconds.items()}
    pairs = {
        "warm / packed": ("decode, stream, warm cache", "decode, local packed"),
        "first / download alone": ("first, stream, read", "first, download alone"),
    }
    extra = {
        name: statistics.median(b / a for a, b in zip(seconds[way], seconds[to], strict=True))
        for name, (way, to) in pairs.items()
        if way in seconds
    }
    if asked.json:
        print(json.dumps({"images/s": speed, "ratio": ratio, **extra}, indent=1))
        return
    size = sum(path.stat().st_size for path in tars.glob("*.tar")) / 1e6
    print(
        f"{where(torch.device('cpu'))}; {asked.images} JPEGs, {asked.size} pixels, {asked.shards} shards, {size:.0f} MB"
    )
    print(f"{'loopback, not S3':<32} {'images/s':>9} {'ratio':>6}  to")
    for name in ways:
        print(f"{name:<32} {speed[name]:>9.0f} " + (f"{ratio[name]:>6.2f}  {compared[name]}" if name in ratio else ""))
    for name, value in extra.items():
        print(f"{name:<32} {'':>9} {value:>6.2f}")


if __name__ == "__main__":
    main()
