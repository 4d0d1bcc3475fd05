"""The engine: admission, the step loop, text and outputs, and the offline API."""
