"""The device side of an engine: the request table, the batch of one step, the model runner, the executor."""
