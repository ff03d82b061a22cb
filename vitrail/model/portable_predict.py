"""python predict.py model.onnx cat.jpg dog.png [--json] [--top 3] [--coverage 0.95] [--sets lac] [--keep 0.95]

Predictions of an exported file by numpy, pillow and onnxruntime. --coverage P: a set of classes that holds the right
one with this probability (--sets: lac, aps or raps); --keep P: unknown is what scores below this share of known images.
"""

import argparse
import json

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def decode(path, size, crop_ratio, reducing_gap=None, **_):
    """The upright RGB image of a file: alpha on white, 16 bits scaled to 8; a JPEG far too large is decoded smaller."""
    (file := Image.open(path)).draft(None, reducing_gap and (at := int(reducing_gap * int(size / crop_ratio)), at))
    image = ImageOps.exif_transpose(file)
    if image.mode in ("I", "F"):
        raise ValueError(f"32 bits per channel (mode {image.mode}); convert it to 8 or 16")
    if image.mode.startswith("I;16"):
        image = Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def square(image, size, crop_ratio, resize, interpolation, mean, reducing_gap=None, **_):
    """The bytes that the model takes [1, 3, size, size]: resized, the centre cropped or padded with the mean colour."""
    wanted = [int(size / crop_ratio)] * 2  # resize == "squash"
    if resize == "crop":
        wanted = [int(wanted[0] * side / min(image.size)) for side in image.size]
    elif resize == "pad":
        wanted = [max(1, round(side / (max(image.size) / wanted[0]))) for side in image.size]
    corner = [(size - side) // 2 if side < size else round((size - side) / 2) for side in wanted]
    canvas = Image.new("RGB", (size, size), tuple(round(255 * share) for share in mean))
    canvas.paste(image.resize(wanted, Image.Resampling[interpolation.upper()], None, reducing_gap), tuple(corner))
    return np.asarray(canvas).transpose(2, 0, 1)[None]


def set_size(falling, scores, flags):
    """How many of the classes, most probable first, hold the right one; `scores` are those of held-out labels."""
    rank, over = int(np.ceil((len(scores) + 1) * flags.coverage - 1e-9)), np.arange(-4, len(falling) - 4).clip(0)
    values = 1 - falling if flags.sets == "lac" else np.cumsum(falling) - falling + (flags.sets == "raps") * 0.01 * over
    return max(1, int((values <= (scores[rank - 1] if rank <= len(scores) else np.inf)).sum()))


def predict(session, about, path, flags):
    """The prediction for an image file, with the keys of `vitrail predict --json`."""
    how = about["preprocess"]
    chances, *score = (row[0] for row in session.run(None, {"images": square(decode(path, **how), **how)}))
    order, held, known = np.argsort(-chances, kind="stable"), int((chances > 0.5).sum()), about["trust"]["known"]
    pairs, one = [[about["classes"][c], float(chances[c])] for c in order], not about["multilabel"]
    answer = {"path": path, "label": "|".join(name for name, _ in pairs[: 1 if one else held])}
    answer |= {"probability": pairs[0][1], "top": pairs[: flags.top if one or not held else held]}
    if flags.coverage:
        answer["set"] = pairs[: set_size(chances[order].astype(float), about["trust"]["labels"][flags.sets], flags)]
    cut = known[-int(np.ceil(len(known) * flags.keep - 1e-9))] if flags.keep else None
    return answer | ({"unknown": bool(score[0] < cut)} if flags.keep else {})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("files", nargs="+")
    for flag, default in {"top": 3, "coverage": 0.0, "sets": "lac", "keep": 0.0}.items():
        parser.add_argument(f"--{flag}", type=type(default), default=default)
    parser.add_argument("--json", action="store_true")
    flags, failed = parser.parse_args(), False
    if not (0 <= flags.coverage < 1 and 0 <= flags.keep <= 1):
        parser.error("--coverage and --keep are shares between 0 and 1, as 0.95")
    session = onnxruntime.InferenceSession(flags.files[0])
    about = {key: json.loads(text) for key, text in session.get_modelmeta().custom_metadata_map.items()}
    if (flags.coverage and flags.sets not in about["trust"]["labels"]) or (flags.keep and not about["trust"]["known"]):
        parser.error(about["trust"]["note"])
    for path in flags.files[1:]:
        try:
            answer = predict(session, about, path, flags)
        except Exception as error:  # damaged files make Pillow raise nearly every exception type there is
            answer, failed = {"path": path, "error": str(error)}, True
        print(json.dumps(answer) if flags.json else "  ".join(map(str, answer.values())))
    raise SystemExit(failed)
