"""`model=transformers`: any causal language model of transformers over our paged attention. Slower than a family of
this package, and correct; a model for which it would not be correct is refused."""
