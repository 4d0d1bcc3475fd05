"""What acme announces."""

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components():
    return [
        ComponentSpec("stage", "acme_bias", "acme_plugin.bias:AcmeBias", config="acme_plugin.config:AcmeBiasConfig"),
        ComponentSpec(
            "stage", "acme_fatigue", "acme_plugin.fatigue:AcmeFatigue", config="acme_plugin.config:AcmeFatigueConfig"
        ),
        ComponentSpec("policy", "acme_lifo", "acme_plugin.lifo:AcmeLifo"),
    ]
