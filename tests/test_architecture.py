"""The rooms of the house and who may look into which: every import counts, those inside functions too."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "cumulant"

# What every room may use: it uses nothing of the house itself but what stands to the right of it here.
GROUND = ("call", "held", "moments", "closures", "tensors", "tracing", "shards", "lazy", "optional", "style", "command",
          "grammar", "kinds")  # fmt: skip
# A room sees those to the right of it. `attention` is the files of the core: one idea, several files.
INNER = ("train", "distributed", "data", "models", "nn", "zoo", "cluster", "attention", "kernels")
# These stand outside and look in; each also at those before it, nobody at them.
OUTER = ("inspect", "conversion", "explain", "bench", "studies", "web")
CORE = ("attention", "expansion", "around", "saturated", "causal", "streaming")
DOORS = ("__init__", "__main__", "arrival", "cli", "listing")  # see everything


def room_of(parts: tuple[str, ...]) -> str:
    first = parts[0].removesuffix(".py")
    return "attention" if first in CORE else first


def imports_of(path: Path) -> set[str]:
    """Rooms that a file imports, wherever in it."""
    here, found = path.relative_to(SOURCE).parts, set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [tuple(a.name.split(".")[1:]) for a in node.names if a.name.split(".")[0] == "cumulant"]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = here[: len(here) - node.level]
                target = (*base, *(node.module or "").split(".")) if node.module else base
            elif (node.module or "").split(".")[0] == "cumulant":
                target = tuple(node.module.split(".")[1:])
            else:
                continue
            names = [target] if target else [(a.name,) for a in node.names]
        found |= {room_of(name) for name in names if name}
    return found


def allowed(room: str) -> set[str]:
    if room in GROUND:
        return set(GROUND)
    if room in INNER:
        return {*INNER[INNER.index(room) :], *GROUND}
    return {*OUTER[: OUTER.index(room) + 1], *INNER, *GROUND}


def test_every_file_belongs_to_a_room():
    rooms = {room_of(path.relative_to(SOURCE).parts) for path in SOURCE.rglob("*.py")}
    assert rooms <= {*GROUND, *INNER, *OUTER, *DOORS}


@pytest.mark.parametrize("room", [*GROUND, *INNER, *OUTER])
def test_a_room_imports_only_what_it_may_see(room):
    wrong = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        if room_of(parts) == room:
            seen = imports_of(path) - allowed(room) - {"__version__"}
            if seen:
                wrong["/".join(parts)] = sorted(seen)
    assert wrong == {}


def test_the_ground_has_no_cycle():
    """`allowed` lets the files of the ground see each other; in this order they see only later ones."""
    order = {**dict.fromkeys(GROUND, 0), "moments": 4, "held": 3, "call": 2, "closures": 1, "style": 1, "tensors": 1}
    for name in GROUND:
        path = SOURCE / f"{name}.py"
        if path.exists():
            assert all(order[seen] < order[name] for seen in imports_of(path)), name


def test_files_of_tests_have_names_of_their_own():
    """Two of one name in different folders cannot be collected in one session."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()
