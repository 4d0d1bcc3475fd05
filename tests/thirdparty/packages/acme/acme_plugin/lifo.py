"""Last come, first served."""


class AcmeLifo:
    """The newest request goes first; the oldest running one yields."""

    def __init__(self, options, ctx):
        pass  # it has no options and needs nothing

    def order(self, waiting):
        return sorted(waiting, key=lambda request: -request.arrival_index)

    def admit(self, request, budget):
        return True

    def victim(self, running):
        return min(running, key=lambda request: request.arrival_index)
