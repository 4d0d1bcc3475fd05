"""What future announces."""

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components():
    return [ComponentSpec("policy", "future_policy", "future_plugin.policy:Policy", api=(1, 99))]
