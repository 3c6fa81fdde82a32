"""The `tandem` command: serve a model, or say what is missing to do so."""
