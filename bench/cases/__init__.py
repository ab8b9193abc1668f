"""One module per benchmark; each has `run(ctx)`, which yields rows."""
