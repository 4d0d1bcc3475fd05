"""A policy that nobody chooses: the plugin's name that is free."""


class Free:
    """Could be chosen, since only the other name of this plugin is taken."""
