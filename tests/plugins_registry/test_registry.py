"""The registry holds what plugins announce, and what failed stops nobody. Each test builds its own."""

import logging
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points

import pytest

from framework.errors import PluginError
from framework.plugins import ANY, KINDS, ComponentSpec, Registry, hookimpl, registry


def announcing(*specs):
    """A plugin object that announces the specs."""

    class Announces:
        @hookimpl
        def framework_components(self):
            return specs

    return Announces()


@pytest.fixture
def load(monkeypatch):
    """Registry of the core and of plugin objects given by name (an exception stands for a module that raises it)."""

    def loaded(**plugins):
        module = type(sys)("made_up")
        module.__getattr__ = lambda name: raise_or_return(plugins, name)
        monkeypatch.setitem(sys.modules, "made_up", module)
        return Registry.load([EntryPoint(name, f"made_up:{name}", "framework.plugins") for name in plugins])

    return loaded


def raise_or_return(plugins, name):
    if name not in plugins:
        raise AttributeError(name)
    if isinstance(plugins[name], BaseException):
        raise plugins[name]
    return plugins[name]


def usable(): ...
def no_device():
    return "no device is visible"


def crashes():
    raise OSError("driver says no")


HERE = "made_up_probes"


@pytest.fixture(autouse=True)
def probes(monkeypatch):
    module = type(sys)(HERE)
    module.usable, module.no_device, module.crashes, module.Thing = usable, no_device, crashes, Registry
    monkeypatch.setitem(sys.modules, HERE, module)


def test_every_kind_that_is_shipped_is_announced_through_entry_points():
    kinds = {spec.kind for spec in registry().specs()}
    assert {"backend", "attention", "model", "policy", "stage", "loader", "scheduler", "executor", "run"} <= kinds
    assert all(spec.dist == "framework" for spec in Registry.load(
        ep for ep in entry_points(group="framework.plugins") if ep.dist.name == "framework").specs())  # fmt: skip


def test_announcing_imports_nothing_heavy():
    program = """
import sys
from framework.plugins import registry
assert len(registry().specs()) > 10 and not registry().failures
heavy = {"torch", "triton", "transformers", "hydra", "omegaconf", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"FRAMEWORK_PLUGINS": "framework"})


def test_unknown_component_names_the_nearest_the_installed_and_the_broken(load):
    found = load(
        good=announcing(ComponentSpec("stage", "gumbel", "a:B"), ComponentSpec("stage", "greedy", "a:B")),
        fancy=ModuleNotFoundError("No module named 'xgrammar'"),
    )
    with pytest.raises(PluginError) as caught:
        found.spec("stage", "gumbl")
    assert str(caught.value) == (
        "stage=gumbl: no installed plugin provides it. Did you mean 'gumbel'? Installed: greedy, gumbel."
        " Failed to import: fancy (No module named 'xgrammar')."
    )


@pytest.mark.parametrize("error", [RuntimeError("too old"), SystemExit(3), ImportError("no symbol")])
def test_plugin_that_raises_is_named_and_the_others_load(load, caplog, error):
    with caplog.at_level(logging.WARNING, "framework"):
        found = load(bad=error, good=announcing(ComponentSpec("policy", "mine", "a:B")))
    assert found.spec("policy", "mine").name == "mine"
    assert [failure.plugin for failure in found.failures] == ["bad"]
    assert str(error) in found.failures[0].reason
    assert "plugin bad of ? ?" in caplog.text


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (ComponentSpec("scheduler", "default", "a:B"), "scheduler/default is refused: framework announces a component"),
        (ComponentSpec("policy", "x", "a:B", api=(2, 0)), "policy/x needs plugin API 2.0, but this is 1.0"),
        (ComponentSpec("policy", "x", "a:B", api=(1, 1)), "policy/x needs plugin API 1.1, but this is 1.0"),
        (ComponentSpec("polcy", "x", "a:B"), "there is no kind 'polcy'. Did you mean 'policy'?"),
        (ComponentSpec("policy", "x", "a.B"), "policy/x points at 'a.B', which does not read"),
        ("policy", "announces 'policy', which is no ComponentSpec"),
        (ComponentSpec("policy", "x", "a:B", api=1), "announces policy/x with api=1, which must be two integers"),
        (ComponentSpec("policy", "x", "a:B", api=(1,)), "with api=(1,), which must be two integers"),
        (ComponentSpec("policy", "x", "a:B", api=(1, "0")), "with api=(1, '0'), which must be two integers"),
        (ComponentSpec("policy", "x", 7), "announces policy/x with target=7, which must be a non-empty string"),
        (ComponentSpec("policy", "x", None), "with target=None, which must be a non-empty string"),
        (ComponentSpec("policy", 5, "a:B"), "announces policy/5 with name=5, which must be a non-empty string"),
        (ComponentSpec(["policy"], "x", "a:B"), "with kind=['policy'], which must be a non-empty string"),
        (ComponentSpec("policy", "x", "a:B", priority="9"), "with priority='9', which must be an integer"),
        (ComponentSpec("policy", "x", "a:B", probe=len), "which must be a non-empty string or None"),
        (ComponentSpec("model", "x", "a:B", provides="Llama"), "provides='Llama', which must be a tuple of strings"),
    ],
)
def test_refused_component_leaves_the_plugins_others(load, spec, reason):
    found = load(mixed=announcing(spec, ComponentSpec("policy", "good", "a:B")))
    assert found.spec("policy", "good")
    assert reason in found.failures[0].reason
    assert found.spec("scheduler", "default").dist == "framework"


def test_misspelt_hook_is_named_with_the_nearest(load, caplog):
    class Misspelt:
        @hookimpl
        def framework_component(self):
            return []

    found = load(typo=Misspelt(), other=announcing(ComponentSpec("polcy", "x", "a:B")))
    reason = "implements the hook 'framework_component', which is not there. Did you mean 'framework_components'?"
    assert found.failures[1].reason == reason
    assert f"plugin typo of ? ?: {reason} It is left out." in caplog.messages
    with pytest.raises(PluginError, match=r"Left out: .* Did you mean 'policy'\?$"):
        found.spec("policy", "x")


def test_target_is_imported_only_when_it_is_asked_for(load):
    found = load(
        lazy=announcing(ComponentSpec("policy", "thing", f"{HERE}:Thing"), ComponentSpec("policy", "no", "no.x:Y"))
    )
    assert found.load_target("policy", "thing") is Registry


@pytest.fixture
def gpu_package(tmp_path, monkeypatch):
    """A package whose module `kernels` needs a library that is not installed."""
    (tmp_path / "gpu_pkg").mkdir()
    (tmp_path / "gpu_pkg" / "__init__.py").write_text("")
    (tmp_path / "gpu_pkg" / "kernels.py").write_text("import absent_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_missing_optional_module_gives_the_install_command(load, gpu_package):
    found = load(gpu=announcing(ComponentSpec("backend", "cuda", "gpu_pkg.kernels:Y", extra="cuda")))
    message = r"backend 'cuda' of \? \? needs the module 'absent_library'\. Install it with: pip install '\?\[cuda\]'"
    with pytest.raises(PluginError, match=message):
        found.load_target("backend", "cuda")


def test_missing_part_of_its_own_keeps_its_trace(load, gpu_package):
    found = load(gpu=announcing(ComponentSpec("backend", "cuda", "gpu_pkg.nothing:Y")))
    with pytest.raises(ModuleNotFoundError, match=r"gpu_pkg\.nothing"):
        found.load_target("backend", "cuda")


def test_target_without_its_attribute_is_named(load):
    found = load(odd=announcing(ComponentSpec("policy", "odd", f"{HERE}:Absent")))
    message = r"policy 'odd' of \? \? points at 'made_up_probes:Absent', which is not there"
    with pytest.raises(PluginError, match=message):
        found.load_target("policy", "odd")


BACKENDS = (
    ComponentSpec("backend", "cpu", f"{HERE}:Thing"),
    ComponentSpec("backend", "gpu", f"{HERE}:Thing", probe=f"{HERE}:no_device", priority=100),
    ComponentSpec("backend", "npu", f"{HERE}:Thing", probe=f"{HERE}:crashes", priority=90),
    ComponentSpec("backend", "xpu", f"{HERE}:Thing", probe=f"{HERE}:usable", priority=50),
)


def test_auto_takes_the_usable_one_of_the_highest_priority(load):
    assert load(many=announcing(*BACKENDS)).auto("backend").name == "xpu"


ATTENTIONS = (
    ComponentSpec("attention", "host", f"{HERE}:Thing", provides=("cpu",)),
    ComponentSpec("attention", "fast", f"{HERE}:Thing", provides=("cuda", "xpu"), priority=10),
    ComponentSpec("attention", "plain", f"{HERE}:Thing", priority=-1),
)


@pytest.mark.parametrize(("device", "name"), [("cuda", "fast"), ("cpu", "host"), ("tpu", "plain"), (None, "fast")])
def test_auto_takes_one_that_computes_on_the_device_of_the_backend(load, device, name):
    assert load(many=announcing(*ATTENTIONS)).auto("attention", device).name == name


def test_component_for_other_devices_says_which(load):
    plugins = load(many=announcing(*ATTENTIONS))
    assert plugins.misfit("attention", "fast", "cpu") == "it computes on cuda and xpu, and the backend on cpu"
    message = "attention=auto: no attention can be used here .*host: it computes on cpu, and the backend on cuda"
    with pytest.raises(PluginError, match=message):
        load(many=announcing(ATTENTIONS[0])).auto("attention", "cuda")


def test_explicit_component_whose_probe_refuses_is_an_error_with_the_ways_out(load):
    with pytest.raises(PluginError) as caught:
        load(many=announcing(*BACKENDS)).load_target("backend", "gpu")
    assert str(caught.value) == (
        "backend 'gpu' cannot be used here: no device is visible."
        " Use backend=auto to pick one, or backend=cpu or backend=xpu"
    )


def test_probe_that_raises_is_a_reason(load):
    assert load(many=announcing(*BACKENDS)).usable("backend", "npu") == "OSError: driver says no"


def test_auto_without_a_usable_one_lists_every_reason(load):
    message = r"backend=auto: no backend can be used here \(gpu: no device is visible; npu: OSError: driver says no\)"
    with pytest.raises(PluginError, match=message):
        load(many=announcing(*BACKENDS[1:3])).auto("backend")


def choosing(name):
    class Chooses:
        @hookimpl
        def select_backend(self, candidates):
            if isinstance(name, Exception):
                raise name
            return name

    return Chooses()


@pytest.mark.parametrize(("choice", "chosen"), [("cpu", "cpu"), (None, "xpu"), (ValueError("no idea"), "xpu")])
def test_plugin_may_select_the_backend(load, choice, chosen):
    assert load(many=announcing(*BACKENDS), chooser=choosing(choice)).auto("backend").name == chosen


def test_selected_backend_must_be_usable(load):
    found = load(many=announcing(*BACKENDS), chooser=choosing("gpu"))
    with pytest.raises(PluginError, match=r"selected 'gpu', which cannot be used here\. Usable: xpu, cpu"):
        found.auto("backend")


def test_provider_serves_by_what_it_provides(load):
    found = load(
        models=announcing(
            ComponentSpec("model", "plain", "a:B", provides=("LlamaForCausalLM",)),
            ComponentSpec("model", "tuned", "a:B", provides=("LlamaForCausalLM",), priority=5),
        )
    )
    assert found.provider("model", "LlamaForCausalLM").name == "tuned"
    with pytest.raises(PluginError) as caught:
        found.provider("model", "LamaForCausalLM")
    assert str(caught.value) == (
        "no installed model plugin supports 'LamaForCausalLM'. Did you mean 'LlamaForCausalLM'?"
        " Supported: LlamaForCausalLM."
    )


def test_what_serves_anything_provides_nothing_by_itself(load):
    found = load(models=announcing(ComponentSpec("model", "generic", "a:B", provides=(ANY,))))
    with pytest.raises(PluginError, match=r"no installed model plugin supports 'Any'\. Supported: nothing"):
        found.provider("model", "Any")


def test_kinds_are_distinct():
    assert len(set(KINDS)) == len(KINDS)
