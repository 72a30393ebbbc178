"""The rules of the native way: for each torch function, how to do it for all trials of a bundle at once."""

from importlib import import_module

for _room in ("elementwise", "reductions", "shapes", "linear", "convolution", "normalization", "channelwise",
              "embedding", "recurrent", "packed", "attention", "losses", "indexing", "lists", "functions",
              "gradients", "scripts", "sparse", "validation", "checkpoints"):  # fmt: skip
    import_module(f"{__name__}.{_room}")
