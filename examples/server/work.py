# SPDX-License-Identifier: Apache-2.0
"""The ordinary Python around the model: decode an upload, write a log line.

Nothing here knows about asyncio, HTTP or aiocolocated. Both functions block: decoding takes CPU
time, ``fsync`` takes disk time. Every mode of the server runs exactly this code.
"""

from __future__ import annotations

import io
import json
import os
import time
from typing import TypedDict

import numpy as np
import numpy.typing as npt
from PIL import Image

MAX_PIXELS = 4_000_000
"""Larger pictures are refused before decoding: few bytes of PNG can claim to be gigapixels."""


class BadUpload(ValueError):
    """The upload is not a usable picture; the text says why and goes to the client."""


class Prediction(TypedDict):
    """What the client gets."""

    digit: int
    confidence: float


def decode_png(data: bytes) -> npt.NDArray[np.float32]:
    """Turn a PNG of any size into the model's input ``f32[1, 64]``, 0 (paper) to 1 (ink).

    Raises:
        BadUpload: not a PNG, damaged, or larger than ``MAX_PIXELS``.
    """
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadUpload(f"{image.width} x {image.height} pixels are too many")
            small = image.convert("L").resize((8, 8), Image.Resampling.BOX)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as exc:
        if isinstance(exc, BadUpload):
            raise
        # Pillow's own text shows the address of its buffer, which is of no use to a client.
        raise BadUpload("the upload is not a readable PNG") from exc
    return np.asarray(small, np.float32).reshape(1, 64) / np.float32(255)


def encode_png(pixels: npt.NDArray[np.float32], size: int = 384) -> bytes:
    """The opposite, for clients: ``f32[64]`` in 0..1 as a colour PNG of ``size`` x ``size``."""
    small = Image.fromarray((pixels.reshape(8, 8) * 255).round().astype(np.uint8))
    scan = small.resize((size, size), Image.Resampling.BICUBIC).convert("RGB")
    out = io.BytesIO()
    scan.save(out, "PNG", compress_level=1)
    return out.getvalue()


def to_prediction(logits: npt.NDArray[np.float32]) -> Prediction:
    """The most likely digit of ``logits``: ``f32[1, 10]``, and its softmax probability."""
    exp = np.exp(logits[0] - logits[0].max())
    digit = int(exp.argmax())
    return {"digit": digit, "confidence": round(float(exp[digit] / exp.sum()), 4)}


def append_line(path: str, request_id: int, prediction: Prediction, slow_disk: float) -> None:
    """Append one JSON line to the prediction log and return when it is on the disk.

    ``O_APPEND`` makes concurrent writers safe: each line is one write at the end of the file.
    ``slow_disk`` (seconds) sleeps after the write, to imitate a slower disk; 0 is the real one.
    """
    line = json.dumps({"time": time.time(), "request": request_id, **prediction}) + "\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, line.encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    if slow_disk:
        time.sleep(slow_disk)
