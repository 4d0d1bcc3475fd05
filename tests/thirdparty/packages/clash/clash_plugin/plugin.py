"""What clash announces: one name that is taken, one that is free."""

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components():
    return [
        ComponentSpec("stage", "min_p", "clash_plugin.min_p:MinP"),
        ComponentSpec("policy", "clash_free", "clash_plugin.free:Free"),
    ]
