"""Tar shards behind URLs: the same images as from local tars, whatever the network does meanwhile."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from static_server import StaticServer, serving

from vitrail.data import remote, shard_cache
from vitrail.data.augment.host import Augment
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.dataset import DataSet
from vitrail.data.jpeg import EncodedImages
from vitrail.data.loading.loader import LoaderSpec, TrainLoader
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.open import open_data, open_source
from vitrail.data.pack import pack
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.stream import StreamReader
from vitrail.files import cache_folder

pytest.importorskip("aiohttp", reason="aiohttp is not installed (vitrail[cloud])")
SHARDS, EACH = 4, 6


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)


@pytest.fixture(scope="module")
def tars(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of six JPEGs of three classes, with the numbers of their classes beside them, and their names."""
    folder = tmp_path_factory.mktemp("tars")
    images = sorted(photos.rglob("*.jpg"), key=lambda path: path.name)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"train-{shard:02d}.tar", "w") as tar:
            for i, path in enumerate(images[shard * EACH : (shard + 1) * EACH]):
                label = str(("blue", "green", "red").index(path.parent.name))
                for name, content in ((f"{i}.jpg", path.read_bytes()), (f"{i}.cls", label.encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    (folder / "classes.txt").write_text("wren\ncrow\nauk\n")
    return folder


@pytest.fixture
def server(tars: Path) -> Iterator[StaticServer]:
    with serving({f"/{path.name}": path.read_bytes() for path in tars.iterdir()}) as made:
        yield made


def pattern(server: StaticServer) -> str:
    return f"{server.url}/train-{{00..{SHARDS - 1:02d}}}.tar"


def stored(data: DataSet) -> list[tuple[str, str, bytes]]:
    """Split and name, class and encoded image of every row."""
    return [
        (f"{name}/{split.keys[row]}", data.classes[split.labels[row]], split.reader.stored(int(split.index[row])))  # type: ignore[attr-defined]
        for name, split in data.splits.items()
        for row in range(len(split))
    ]


def cached() -> list[Path]:
    return sorted((cache_folder() / "streams").glob("*.tar"))


@pytest.mark.parametrize("read", ["", "?read=whole", "?read=ranged", "?read=whole&cache=40KB"])
def test_streamed_images_are_those_of_the_local_tars(server: StaticServer, tars: Path, read: str) -> None:
    assert stored(open_data(pattern(server) + read)) == stored(open_data(tars))


def test_a_url_of_local_files_is_read_in_place(tars: Path) -> None:
    assert stored(open_data(f"file://{tars}/train-{{00..03}}.tar")) == stored(open_data(tars))
    assert not cached()


def test_another_run_asks_for_one_byte_of_each_shard(server: StaticServer) -> None:
    open_source(pattern(server))
    server.bytes_sent.clear()
    stored(open_source(pattern(server)))
    assert [server.bytes_sent[f"/train-{i:02d}.tar"] for i in range(SHARDS)] == [1] * SHARDS


def test_jpeg_bytes_reach_the_decoder_of_an_accelerator(server: StaticServer, tars: Path) -> None:
    streamed, local = (EncodedImages(open_source(uri)["train"], "cpu") for uri in (pattern(server), str(tars)))
    for row in range(SHARDS * EACH):
        ours, theirs = streamed.get(row), local.get(row)
        assert ours is not None
        assert theirs is not None
        assert ours[1] == theirs[1]
        assert ours[0].tolist() == theirs[0].tolist()


def test_a_signature_is_sent_and_never_shown(server: StaticServer) -> None:
    with pytest.raises(FileNotFoundError) as error:
        open_source(f"{server.url}/train-{{00..09}}.tar?sig=secret&read=ranged")
    assert "secret" not in str(error.value)
    assert "sig=secret" in server.queries
    data = open_source(f"{pattern(server)}?sig=secret&read=ranged")
    assert "secret" not in f"{data.uri} {data.notes}"
    assert "secret" not in "".join(p.read_text() for p in (cache_folder() / "streams").glob("*.json"))


@pytest.mark.parametrize("read", ["whole", "ranged"])
@pytest.mark.parametrize("fault", [503, 429, "truncated"])
def test_what_passes_is_tried_again(server: StaticServer, tars: Path, fault: int | str, read: str) -> None:
    server.faults = {f"/{path.name}": deque([fault] * 3) for path in tars.glob("*.tar")}
    assert stored(open_source(f"{pattern(server)}?read={read}")) == stored(open_source(str(tars)))
    assert not any(server.faults.values())


def test_a_silent_server_is_asked_again(server: StaticServer, tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TIMEOUT", 0.2)
    server.faults = {"/train-01.tar": deque(["silent"])}
    assert stored(open_source(pattern(server))) == stored(open_source(str(tars)))
    assert server.requests["/train-01.tar"] > 2


def test_a_slow_server_is_waited_for(server: StaticServer, tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TIMEOUT", 0.3)
    server.faults = {"/train-01.tar": deque(["slow"] * 2)}
    assert stored(open_source(pattern(server))) == stored(open_source(str(tars)))


def test_a_server_that_stays_down_ends_after_stated_tries(server: StaticServer) -> None:
    server.faults = {"/train-02.tar": deque([503] * 100)}
    with pytest.raises(ConnectionError, match=r"train-02.tar could not be read in 5 tries, the last .*status 503"):
        open_source(pattern(server))
    assert server.requests["/train-02.tar"] == remote.TRIES


@pytest.mark.parametrize(
    ("status", "kind", "sentence"),
    [
        (403, PermissionError, r"no permission to read http://.*/train-01.tar; set its credentials"),
        (404, FileNotFoundError, r"there is no http://.*/train-01.tar; correct the URL"),
    ],
)
def test_what_does_not_pass_is_named_at_once(
    server: StaticServer, status: int, kind: type[Exception], sentence: str
) -> None:
    server.faults = {"/train-01.tar": deque([status])}
    with pytest.raises(kind, match=sentence):
        open_source(pattern(server))
    assert server.requests["/train-01.tar"] == 1


def test_an_object_that_changes_in_mid_epoch_is_named(server: StaticServer) -> None:
    split = open_source(f"{pattern(server)}?read=ranged")["train"]
    split.read(EACH)
    server.files["/train-01.tar"] = server.files["/train-02.tar"]
    split.read(0)
    with pytest.raises(
        ValueError, match=r"/train-01\.tar has changed since it was indexed .*; put the old object back"
    ):
        split.read(EACH)


def test_an_object_that_changed_between_runs_is_indexed_anew(server: StaticServer) -> None:
    before = stored(open_source(pattern(server)))
    server.files["/train-01.tar"] = server.files["/train-02.tar"]
    after = stored(open_source(pattern(server)))
    assert [image for *_, image in after[EACH : 2 * EACH]] == [image for *_, image in before[2 * EACH : 3 * EACH]]


def test_a_damaged_index_is_made_again(server: StaticServer) -> None:
    before = stored(open_source(pattern(server)))
    for file in (cache_folder() / "streams").glob("*.json"):
        file.write_text(file.read_text()[:40])
    assert stored(open_source(pattern(server))) == before


def test_the_cache_keeps_its_bound_and_what_was_used_last(server: StaticServer) -> None:
    size = len(server.files["/train-00.tar"])
    split = open_source(f"{pattern(server)}?read=whole&cache={2 * size + 100}")["train"]
    reader = split.reader
    assert isinstance(reader, StreamReader)
    most = 0
    for shard in (0, 1, 0, 2):
        reader.cache.fetch(reader.shards[shard])
        for path in cached():  # marks of use are a second apart: let that be long ago
            if path != reader.cache.file(reader.shards[shard], ".tar"):
                os.utime(path, (path.stat().st_mtime - 10,) * 2)
        most = max(most, sum(path.stat().st_size for path in (cache_folder() / "streams").glob("*.tar")))
    assert most <= 2 * size + 100
    assert cached() == sorted(reader.cache.file(reader.shards[shard], ".tar") for shard in (0, 2))


def test_a_shard_that_is_open_can_be_read_to_its_end(server: StaticServer) -> None:
    size = len(server.files["/train-00.tar"])
    reader = open_source(f"{pattern(server)}?read=whole&cache={size + 100}")["train"].reader
    assert isinstance(reader, StreamReader)
    with reader.cache.fetch(reader.shards[0]).open("rb") as stream:
        stream.read(1)
        reader.cache.fetch(reader.shards[1])
        assert stream.read() == server.files["/train-00.tar"][1:]


SCRIPT = """
import hashlib, sys
from vitrail.data.open import open_source
split = open_source(sys.argv[1])["train"]
print(hashlib.md5(b"".join(split.reader.stored(i) for i in range(len(split)))).hexdigest())
"""


def opened(uri: str) -> subprocess.Popen[str]:
    """Another process that reads all images of a data set and prints their digest."""
    return subprocess.Popen([sys.executable, "-c", SCRIPT, uri], stdout=subprocess.PIPE, text=True)


def test_processes_that_fill_a_cache_together_fetch_each_shard_once(server: StaticServer, tars: Path) -> None:
    server.faults = {f"/train-{i:02d}.tar": deque(["slow"] * 9) for i in range(SHARDS)}
    others = [opened(pattern(server)) for _ in range(2)]
    digests = {process.communicate(timeout=60)[0] for process in others}
    images = b"".join(image for *_, image in stored(open_source(str(tars))))
    assert digests == {hashlib.md5(images).hexdigest() + "\n"}
    for path in (f"/train-{i:02d}.tar" for i in range(SHARDS)):
        assert server.bytes_sent[path] <= len(server.files[path]) + 2  # and a byte for each process to identify it
    assert not list((cache_folder() / "streams").glob("*.lock"))


def test_a_kill_in_mid_download_leaves_nothing_torn(server: StaticServer, tars: Path) -> None:
    server.faults = {"/train-00.tar": deque(["", "slow"])}
    process = opened(pattern(server))
    folder = cache_folder() / "streams"
    until = time.monotonic() + 60
    while not list(folder.glob(".*.tmp")) and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=10)
    assert list(folder.glob(".*.tmp"))
    assert not cached()
    assert stored(open_source(pattern(server))) == stored(open_source(str(tars)))
    assert not [*folder.glob(".*.tmp"), *folder.glob("*.lock")]


def test_a_lock_of_a_process_that_is_gone_is_taken_over(server: StaticServer, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = open_source(f"{pattern(server)}?read=ranged")["train"].reader
    assert isinstance(reader, StreamReader)
    lock = reader.cache.file(reader.shards[0], ".lock")
    lock.write_text("00000000-1")  # of another machine
    os.utime(lock, (time.time() - shard_cache.ABANDONED - 1,) * 2)
    assert reader.cache.fetch(reader.shards[0]).read_bytes() == server.files["/train-00.tar"]


def test_the_next_shards_are_fetched_in_the_background(server: StaticServer) -> None:
    split = open_source(f"{pattern(server)}?read=ranged")["train"]
    reader = split.reader
    assert isinstance(reader, StreamReader)
    object.__setattr__(reader, "whole", True)
    reader.stored(0)
    until = time.monotonic() + 20
    while len(cached()) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert set(cached()) == {reader.cache.file(shard, ".tar") for shard in reader.shards[:3]}


@pytest.mark.parametrize(
    ("uri", "sentence"),
    [
        ("https://host/train-{09..00}.tar", "stands for no shards"),
        ("https://host/train-{}.tar", "stands for no shards"),
        ("https://host/train-{00..09.tar", "stands for no shards"),
        ("https://host/{0..99999}{0..99999}.tar", "or too many"),
        ("https://host/{0..999999999999}.tar", "or too many"),
        ("https://host/train.zip", "it names no .tar file"),
        ("s3://bucket/a.tar?chace=1GB", r"s3://bucket/a.tar: no option 'chace' \(it has cache, read\)"),
        ("https://host/a.tar?cache=much", "cache is a size such as 50GB"),
        ("https://host/a.tar?read=some", "read is whole or ranged, not 'some'"),
        ("nothing://host/a.tar", "no kind of URL that fsspec opens"),
    ],
)
def test_bad_usage_is_a_sentence(uri: str, sentence: str) -> None:
    with pytest.raises((ValueError, OSError), match=sentence):
        open_source(uri)


def test_batches_of_workers_are_those_of_the_local_tars(server: StaticServer, tars: Path) -> None:
    config = PreprocessConfig(size=16)

    def batches(uri: str, workers: int) -> list[tuple[list[int], str]]:
        split = open_source(uri)["train"]
        spec = LoaderSpec(
            split,
            BatchSampler(len(split), 8, 0),
            Augment(AugmentConfig(), config),
            Preprocess(config),
            classes=3,
            seed=0,
            device="cpu",
            workers=workers,
            stop=4,
        )
        with TrainLoader(spec) as loader:
            return [(b.index.tolist(), hashlib.md5(b.views[0].numpy().tobytes()).hexdigest()) for b in loader]

    assert batches(f"{pattern(server)}?read=ranged", 2) == batches(str(tars), 0)


def test_missing_packages_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    remote._filesystem.cache_clear()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match=r"pip install 'vitrail\[cloud\]'"):
        open_source("s3://bucket/train-{000..999}.tar")


def test_shards_without_labels_are_rejected_after_the_first(server: StaticServer) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("0.jpg"))
    server.files = {path: content.getvalue() for path in server.files}
    with pytest.raises(ValueError, match=r"1 of 1 images have no label \(train-00.tar/0.jpg\); put KEY.cls"):
        open_source(pattern(server))
    assert server.bytes_sent["/train-01.tar"] == 1


def test_a_server_without_ranges_is_named(server: StaticServer) -> None:
    server.ranges = False
    with pytest.raises(ValueError, match=r"train-00.tar: status 200, not a range; use a server of plain files"):
        open_source(f"{pattern(server)}?read=ranged")[  # its index takes the whole shard in one request
            "train"
        ].read(1)


@pytest.fixture(scope="module")
def bucket(tars: Path) -> Iterator[str]:
    """The shards in a bucket of a simulated S3 on the loopback address, by their URL."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed (the development extra has it)")
    pytest.importorskip("s3fs", reason="s3fs is not installed (vitrail[cloud])")
    simulated = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    simulated.start()
    host, port = simulated.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        remote._filesystem.cache_clear()
        system = remote.filesystem("s3://shards/x")
        system.mkdir("shards")
        for path in tars.iterdir():
            system.put_file(str(path), f"shards/{path.name}")
        yield "s3://shards/train-{00..03}.tar"
        remote._filesystem.cache_clear()
    simulated.stop()


@pytest.mark.parametrize("read", ["whole", "ranged"])
def test_a_bucket_gives_the_images_of_the_local_tars(bucket: str, tars: Path, read: str) -> None:
    assert stored(open_data(f"{bucket}?read={read}")) == stored(open_data(tars))


def test_an_object_that_is_missing_from_a_bucket_is_named(bucket: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no s3://shards/train-04\.tar"):
        open_source("s3://shards/train-{00..04}.tar")


def test_an_object_of_a_bucket_that_changes_in_mid_epoch_is_named(bucket: str, tars: Path) -> None:
    split, system = open_source(f"{bucket}?read=ranged")["train"], remote.filesystem(bucket)
    system.put_file(str(tars / "train-02.tar"), "shards/train-01.tar")
    try:
        with pytest.raises(ValueError, match=r"s3://shards/train-01\.tar has changed since it was indexed"):
            split.read(EACH)
    finally:
        system.put_file(str(tars / "train-01.tar"), "shards/train-01.tar")


@pytest.fixture
def packed(tars: Path, tmp_path: Path) -> Path:
    pack(open_source(str(tars)), tmp_path / "packed", size=0)
    return tmp_path / "packed"


@pytest.fixture
def pack_server(packed: Path) -> Iterator[StaticServer]:
    with serving({f"/packed/{path.name}": path.read_bytes() for path in packed.iterdir()}) as made:
        yield made


def test_a_packed_folder_behind_a_url_gives_the_pixels_of_the_local_one(
    packed: Path, pack_server: StaticServer
) -> None:
    local, remote_set = open_source(str(packed)), open_source(f"{pack_server.url}/packed/pack.json")
    assert (local.classes, set(local.splits)) == (remote_set.classes, set(remote_set.splits))
    for here, there in zip(local["train"].index, remote_set["train"].index, strict=True):
        assert local["train"].read(int(here)).tobytes() == remote_set["train"].read(int(there)).tobytes()


def test_a_packed_folder_is_fetched_once(pack_server: StaticServer) -> None:
    open_source(f"{pack_server.url}/packed/pack.json")
    before = {path: count for path, count in pack_server.bytes_sent.items() if path.endswith((".bin", ".npy"))}
    open_source(f"{pack_server.url}/packed/pack.json")
    assert before
    assert all(pack_server.bytes_sent[path] == count for path, count in before.items())


def test_a_packed_file_that_was_altered_is_named(pack_server: StaticServer) -> None:
    path = next(path for path in pack_server.files if path.endswith(".bin"))
    pack_server.files[path] = b"\x01" * len(pack_server.files[path])
    with pytest.raises(ValueError, match=r"\.bin has other bytes than pack\.json lists"):
        open_source(f"{pack_server.url}/packed/pack.json")


def test_a_packed_folder_larger_than_the_cache_is_rejected(pack_server: StaticServer) -> None:
    with pytest.raises(ValueError, match="more than the cache; raise"):
        open_source(f"{pack_server.url}/packed/pack.json?cache=1KB")
