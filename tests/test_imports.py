"""The direction of imports, read from the syntax trees: down only, no plugin package in the core, no device in it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = sorted((ROOT / "framework").rglob("*.py"))
PLUGINS = sorted((ROOT / "plugins").rglob("*.py"))
PLUGIN_PACKAGES = {path.name for path in (ROOT / "plugins").glob("*/framework_*")}
OPEN_TO_PLUGINS = {
    "interfaces", "batch", "request", "errors", "rng", "step_ops", "scheduler", "plugins", "layers", "testing", "nulls",
}  # fmt: skip
ARRAY_FUNCTIONS_OF_STAGES = {"sampling.draw", "sampling.groups", "sampling.history", "sampling.interval"}
"""Open to plugins as well: the sampler's array functions (the keyed draw, reductions by groups, the tokens before
a row, the kept interval).

Stages of third parties need them as much as ours: else each would write the draw again, and differ in a bit. They are
pure functions of tensors and know no pipeline. The rest of `sampling` is closed to plugins.
"""
LEVELS = (
    {"__main__"}, {"cli"}, {"origins"}, {"composing", "helptext", "sweep"}, {"runs"}, {"server"}, {"testing"},
    {"engine"}, {"scheduler", "worker", "sampling"}, {"structured"}, {"layers", "checkpoint", "tokenizer"},
    {"plugins", "chat_template", "gguf_vocabulary", "pieces", "clean_up", "nulls", "step_ops"},
    {"config", "words", "stage_order"},
    {"interfaces", "discovery", "promised"}, {"batch", "request"},
    {"__init__", "errors", "rng", "ending", "sent", "secret_words"},
)  # fmt: skip
"""Every part of the core, from the top down: a part imports those of lower levels only, none beside it."""
UPWARDS = {("config", "composing")}
"""`config.compose` is the public door to Hydra: it imports the composer when it is called, and not before."""
MAY_IMPORT_HYDRA = {"cli.py", "composing.py", "origins.py", "callback.py"}


def imports_of(path, runtime_only=False):
    """[(line, dotted module)] of a file; those under `if TYPE_CHECKING` are left out when runtime_only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = set()
    for node in ast.walk(tree):
        if runtime_only and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            skipped |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            found.append((node.lineno, node.module))
            if node.module == "framework":
                found += [(node.lineno, f"framework.{alias.name}") for alias in node.names]
    return found


def part_of(path):
    """`engine` for framework/engine/core.py, `cli` for framework/cli.py."""
    return path.relative_to(ROOT / "framework").parts[0].removesuffix(".py")


def imported_part(module):
    """`engine` for framework.engine.core; `__init__` for framework itself and for its names."""
    name = module.split(".")[1] if "." in module else "__init__"
    return name if name in LEVEL else "__init__"


LEVEL = {part: number for number, level in enumerate(LEVELS) for part in level}


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_core_imports_downwards_and_no_plugin_package(path):
    own = part_of(path)
    for line, module in imports_of(path, runtime_only=True):
        top = module.partition(".")[0]
        assert top not in PLUGIN_PACKAGES, f"{name_of(path)}:{line} imports the plugin package {module}"
        if top == "framework":
            theirs = imported_part(module)
            is_below = theirs == own or LEVEL[theirs] > LEVEL[own] or (own, theirs) in UPWARDS
            assert is_below, f"{name_of(path)}:{line} imports {module}, which stands above it or beside it"


def test_every_part_of_the_core_has_one_level():
    parts = [part for level in LEVELS for part in level]
    assert len(parts) == len(set(parts))
    assert {part_of(path) for path in CORE} - set(parts) == set()
    assert set(parts) - {part_of(path) for path in CORE} == set()


@pytest.mark.parametrize("path", PLUGINS, ids=name_of)
def test_plugin_imports_the_open_parts_of_the_core_and_no_other_plugin(path):
    own = next(part for part in path.parts if part in PLUGIN_PACKAGES)
    for line, module in imports_of(path):
        top, _, rest = module.partition(".")
        assert top not in PLUGIN_PACKAGES - {own}, f"{name_of(path)}:{line} imports another plugin, {module}"
        if top == "framework" and rest:
            is_open = rest.partition(".")[0] in OPEN_TO_PLUGINS or rest in ARRAY_FUNCTIONS_OF_STAGES
            assert is_open, f"{name_of(path)}:{line} imports {module}, which is closed to plugins"


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_core_names_no_device_and_no_kernel_language(path):
    source = path.read_text(encoding="utf-8")
    assert not re.search(r"torch\.(cuda|xpu|mps)\b|\bimport triton|\bfrom triton", source), name_of(path)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("device"):
            named = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            assert set(named) <= {"meta"}, f"{name_of(path)}:{node.lineno} names the device {named}"


@pytest.mark.parametrize("path", [*CORE, *PLUGINS], ids=name_of)
def test_product_code_imports_no_transformers_but_for_the_generic_path(path):
    if path.is_relative_to(ROOT / "plugins" / "models" / "framework_models" / "generic"):
        return  # which is transformers' own code around our attention, and imports it when it is built
    assert "transformers" not in {module.partition(".")[0] for _, module in imports_of(path)}


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_hydra_is_imported_by_the_front_end_alone(path):
    if path.name not in MAY_IMPORT_HYDRA:
        assert not {"hydra", "omegaconf"} & {module.partition(".")[0] for _, module in imports_of(path)}


@pytest.mark.parametrize("path", [p for p in PLUGINS if p.name == "plugin.py"], ids=name_of)
def test_announcement_imports_nothing_but_the_registry(path):
    assert {module for _, module in imports_of(path)} == {"__future__", "framework.plugins"}


def test_folders_of_plugins_conf_and_tests_are_no_packages():
    packages = [ROOT / "plugins" / "__init__.py", *(ROOT / "plugins").glob("*/__init__.py")]
    packages += [*(ROOT / "conf").rglob("__init__.py")]
    packages += [p for p in (ROOT / "tests").rglob("__init__.py") if "packages" not in p.parts]
    assert not [path for path in packages if path.exists()]
