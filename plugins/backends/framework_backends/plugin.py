"""What framework_backends announces: names only, so that nothing heavy is imported before a component is selected."""

from __future__ import annotations

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            "backend",
            "cuda",
            "framework_backends.cuda:CudaBackend",
            extra="cuda",
            probe="framework_backends.cuda_device:probe",
            priority=10,
        ),
        ComponentSpec(
            "backend",
            "cpu",
            "framework_backends.cpu:CpuBackend",
            environment="framework_backends.cpu_environment:environment",
        ),
    ]
