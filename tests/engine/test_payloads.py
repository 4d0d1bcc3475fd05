"""What observe stages collect reaches whoever reads the step's output."""

from dataclasses import replace

from framework import SamplingParams


def test_payloads_of_observe_stages_are_in_the_steps_output(llm, monkeypatch):
    pipeline = llm.engine.core.executor._runner.pipeline
    sample = pipeline.sample

    def with_payload(logits, rows):
        return replace(sample(logits, rows), payloads={"watch": len(logits)})

    class Watch:
        key = "watch"

        class stage:
            collect = staticmethod(lambda payload: payload * 10)

    monkeypatch.setattr(pipeline, "sample", with_payload)
    monkeypatch.setattr(pipeline, "_observers", [Watch])
    llm.engine.add_request("a", [4], SamplingParams(temperature=0, max_tokens=1))
    monkeypatch.setattr(pipeline, "_running", lambda stages, plan: [])
    llm.engine.step()
    assert llm.engine.core.last_output.payloads == {"watch": 10}
