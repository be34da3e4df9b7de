# SPDX-License-Identifier: Apache-2.0
"""Many real image files, cut from the two photographs that scikit-learn ships."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

from PIL import Image

PHOTOS = ("china.jpg", "flower.jpg")


def default_folder() -> Path:
    """Where the tiles are kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "aiocolocated" / "tiles"


def cut(count: int, side: int, folder: Path | None = None) -> list[Path]:
    """Return ``count`` JPEG files of ``side`` x ``side`` pixels, made on first use.

    Args:
        count: how many.
        side: in pixels, up to 427 (the height of the photographs).
        folder: where they are kept; the user's cache by default.
    """
    folder = (folder or default_folder()) / str(side)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"tile-{index:05}.jpg" for index in range(count)]
    if all(path.exists() for path in paths):
        return paths
    images = importlib.resources.files("sklearn") / "datasets" / "images"
    photos = []
    for name in PHOTOS:
        with (images / name).open("rb") as file:
            photos.append(Image.open(file).convert("RGB"))
    for index, path in enumerate(paths):
        photo = photos[index % len(photos)]
        # Multiples of these two irrational numbers spread the tiles evenly over the photograph.
        left = int(index * 0.7548776662 % 1 * (photo.width - side + 1))
        top = int(index * 0.5698402910 % 1 * (photo.height - side + 1))
        # Renamed when complete: an interrupted run leaves no half of a file behind.
        part = path.with_suffix(f".{os.getpid()}")
        photo.crop((left, top, left + side, top + side)).save(part, "JPEG", quality=90)
        part.replace(path)
    return paths
